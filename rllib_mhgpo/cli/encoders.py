"""Encoding by Ray actors, each with the model and the mapped corpus; the driver writes what they return."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rllib_mhgpo.errors import ConfigError

_AHEAD = 2  # places that an actor has before it: one at work, one waiting


class PlaceEncoder:
    """One actor's work."""

    def __init__(self, folder: str, encoder: str, options: dict[str, Any]) -> None:
        from rllib_mhgpo.data import load_corpus
        from rllib_mhgpo.retrieval.build import sentence_encoder
        from rllib_mhgpo.retrieval.store import CORPUS

        self._corpus = load_corpus(Path(folder) / CORPUS)
        self._encoder = sentence_encoder(encoder, options)

    def encode(self, place: int) -> tuple[int, Any]:
        """The vectors of one place."""
        from rllib_mhgpo.retrieval.building import place_vectors

        return place, place_vectors(self._corpus, self._encoder, place)


def ray_encoders(encoder: str, batch_size: int, workers: int, gpus: float) -> Any:
    """Returns what spreads places over so many actors, which share the GPUs; a dead actor is made anew."""

    def encode(folder: Path, made: Any, places: Sequence[int]) -> Iterator[tuple[int, Any]]:
        import ray

        begun_here = not ray.is_initialized()
        if begun_here:
            ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
        there = ray.cluster_resources()
        if workers > there.get("CPU", 0) or gpus > there.get("GPU", 0):
            raise ConfigError(
                f"--workers {workers} --gpus {gpus:g}: this Ray has {there.get('CPU', 0):g} CPUs and"
                f" {there.get('GPU', 0):g} GPUs. Ask for no more."
            )
        options = {"batch_size": batch_size, "device": "cuda" if gpus else "cpu"}
        kind: Any = ray.remote(num_cpus=1, num_gpus=gpus / workers, max_restarts=3, max_task_retries=3)(PlaceEncoder)
        try:
            actors = [kind.remote(str(folder.absolute()), encoder, options) for _ in range(workers)]
            yield from _spread(ray, actors, places)
        finally:
            if begun_here:
                ray.shutdown()

    return encode


def _spread(ray: Any, actors: list[Any], places: Sequence[int]) -> Iterator[tuple[int, Any]]:
    waiting = iter(places)
    at_work: dict[Any, Any] = {}
    for actor in actors * _AHEAD:
        _deal(actor, waiting, at_work)
    while at_work:
        (ready,), _ = ray.wait(list(at_work), num_returns=1)
        actor = at_work.pop(ready)
        place, block = ray.get(ready)
        _deal(actor, waiting, at_work)
        yield place, block


def _deal(actor: Any, waiting: Iterator[int], at_work: dict[Any, Any]) -> None:
    place = next(waiting, None)
    if place is not None:
        at_work[actor.encode.remote(place)] = actor
