"""Peaks by phase, from readings at the ends of phases."""

from vramfit.monitor.sources import MAX_SAMPLES, HostMemory, PhasePeaks, Reading
from vramfit.records.watch import MemorySample


def reading(now: int, peak: int) -> Reading:
    return Reading(
        requested_bytes=now,
        allocated_bytes=now,
        reserved_bytes=now,
        peak_requested_bytes=peak,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=peak,
    )


def test_a_phase_that_raised_the_peak_has_reached_it_and_another_is_known_by_its_ends() -> None:
    tally = PhasePeaks()
    tally.enter(reading(10, 50))
    tally.leave("forward", reading(30, 80))
    tally.enter(reading(30, 80))
    tally.see("backward", reading(60, 80))
    tally.leave("backward", reading(20, 80))
    phases = tally.phases()
    assert phases["forward"].peak_allocated_bytes == 80
    assert phases["backward"].peak_allocated_bytes == 60
    assert tally.peak("allocated_bytes") == 80


def test_without_an_allocator_there_are_no_peaks_but_times() -> None:
    tally = PhasePeaks()
    tally.enter(HostMemory().read())
    tally.leave("load", HostMemory().read())
    assert tally.phases()["load"].peak_allocated_bytes is None
    assert tally.peak("allocated_bytes") is None


def test_samples_are_thinned_and_span_the_whole_time() -> None:
    tally = PhasePeaks()
    for number in range(10 * MAX_SAMPLES):
        tally.sample(MemorySample(time_s=number, phase="forward", step=0, process_bytes=number), "cpu")
    assert MAX_SAMPLES / 3 < len(tally.samples) <= MAX_SAMPLES
    assert tally.samples[0].process_bytes in range(20)
    assert tally.samples[-1].process_bytes in range(int(9.9 * MAX_SAMPLES), 10 * MAX_SAMPLES)
    assert tally.peak_process_bytes == 10 * MAX_SAMPLES - 1


def test_what_the_host_held_is_no_figure_of_the_gpu() -> None:
    tally = PhasePeaks()
    tally.sample(MemorySample(time_s=0, phase="load", step=0, process_bytes=9), "cpu")
    tally.sample(MemorySample(time_s=1, phase="load", step=0, process_bytes=2), "cuda:0")
    assert tally.peak_process_bytes == 2
    assert [s.process_bytes for s in tally.samples] == [None, 2]
