"""The work of a step and the speed of a device → seconds; the profile of a GPU that was measured."""
