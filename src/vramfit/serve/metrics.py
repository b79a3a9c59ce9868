"""`Metrics`: counts, times and memory of a server, in the text form that Prometheus reads."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from vramfit.serve.worker import Figures

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """What has happened so far; any thread may count."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()
        self.replies = Counter("vramfit_requests", "Answers of /invocations by status.", ["status"], registry=registry)
        self.accepted = Counter("vramfit_accepted", "Requests that joined the line.", registry=registry)
        self.answered = Counter("vramfit_answered", "Requests that left it with an answer.", registry=registry)
        self.restarts = Counter("vramfit_worker_restarts", "Workers that were replaced.", registry=registry)
        self.times = Histogram(
            "vramfit_answer_seconds",
            "From the last byte of a request to its answer.",
            buckets=BUCKETS_S,
            registry=registry,
        )

    def total(self, name: str) -> int:
        """A count so far: accepted, answered or worker_restarts."""
        return int(self._registry.get_sample_value(f"vramfit_{name}_total") or 0)

    def text(self, figures: Sequence[Figures | None], num_waiting: int) -> bytes:
        """Everything, with what each worker said last and how many requests wait now."""
        now = CollectorRegistry()
        waiting = Gauge("vramfit_waiting", "Requests in line.", registry=now)
        waiting.set(num_waiting)
        batches, tokens, recoveries = (
            Counter(f"vramfit_{name}", what, ["worker"], registry=now)
            for name, what in (
                ("batches", "Batches that went through the model."),
                ("tokens", "Tokens in them, without padding."),
                ("recoveries", "Times memory ran out and a batch was split."),
            )
        )
        limit = Gauge("vramfit_batch_tokens_limit", "Tokens that a batch may have now.", ["worker"], registry=now)
        memory = Gauge(
            "vramfit_worker_memory_bytes",
            "Reserved peak of the GPU, or what the process holds.",
            ["worker"],
            registry=now,
        )
        for number, said in enumerate(figures):
            if said is not None:
                batches.labels(number).inc(said.num_batches)
                tokens.labels(number).inc(said.num_tokens)
                recoveries.labels(number).inc(said.num_recoveries)
                limit.labels(number).set(said.max_tokens)
                memory.labels(number).set(said.memory_bytes)
        return generate_latest(self._registry) + generate_latest(now)
