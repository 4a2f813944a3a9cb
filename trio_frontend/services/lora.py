"""LoRA adapters: which are loaded, by the names that requests use, and how they come and go.

Rules that hold here:

* The registry is what this server knows; a change goes to the engines first, and into the registry when all have taken it.
* Ids count from 1 and are never used twice in a server's life, so that an engine's caches cannot take a new adapter for an old one.
* A caller may name an adapter on a hub or in a store. A path of the local file system is only for those under the
  operator's allowed prefixes, links and ``..`` resolved (vLLM's VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import trio

from trio_frontend.engine.base import Engine, LoraRequest
from trio_frontend.rpc.status import StatusCode, StatusError
from trio_frontend.services.utilities import NO_LIMIT, Utilities

__all__ = ["PATH_PREFIXES_VARIABLE", "LoraAdapters", "LoraRegistry", "allowed_source"]

PATH_PREFIXES_VARIABLE = "VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES"


class LoraRegistry:
    """Loaded adapters: name -> :class:`LoraRequest`."""

    def __init__(self) -> None:
        self._adapters: dict[str, LoraRequest] = {}
        self._last_id = 0

    def resolve(self, name: str) -> LoraRequest | None:
        """The adapter of this name, None if it is not loaded."""
        return self._adapters.get(name)

    def adapters(self) -> list[LoraRequest]:
        """All loaded adapters, by name."""
        return sorted(self._adapters.values(), key=lambda adapter: adapter.name)

    def reserve(self, name: str, path: str) -> LoraRequest:
        """An adapter with an id of its own, not yet loaded: :meth:`add` it once the engines have it."""
        self._last_id += 1
        return LoraRequest(name=name, id=self._last_id, path=path)

    def add(self, adapter: LoraRequest) -> None:
        self._adapters[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Forget the adapter; requests that already run with it keep it."""
        del self._adapters[name]


class LoraAdapters:
    """Loads adapters into the engines and the registry, and unloads them. Failures are StatusError."""

    def __init__(
        self,
        engine: Engine,
        registry: LoraRegistry,
        utilities: Utilities,
        *,
        served_names: Iterable[str],
        path_prefixes: Iterable[str] = (),
    ) -> None:
        self._engine = engine
        self._registry = registry
        self._utilities = utilities
        self._served_names = frozenset(served_names)
        self._path_prefixes = tuple(path_prefixes)

    async def load(self, name: str, source: str) -> LoraRequest:
        """Load an adapter that a caller named. FAILED_PRECONDITION without LoRA, INVALID_ARGUMENT for an empty name or a
        source that is not allowed, ALREADY_EXISTS for a name in use, INTERNAL if an engine could not."""
        self._check_enabled()
        _check_names(name, source)
        allowed = await trio.to_thread.run_sync(allowed_source, source, self._path_prefixes)
        return await self._load(name, allowed)

    async def load_trusted(self, name: str, source: str) -> LoraRequest:
        """Load an adapter that the operator named: as :meth:`load`, from anywhere."""
        self._check_enabled()
        _check_names(name, source)
        return await self._load(name, source)

    async def unload(self, name: str) -> LoraRequest:
        """NOT_FOUND if it is not loaded, INTERNAL if an engine did not let it go: then it stays loaded."""
        if not name.strip():
            raise StatusError(StatusCode.INVALID_ARGUMENT, f"lora_name {name!r}: a name is required")
        self._check_enabled()
        async with self._utilities.change():
            adapter = self._registry.resolve(name)
            if adapter is None:
                raise StatusError(StatusCode.NOT_FOUND, f"LoRA adapter {name!r} is not loaded")
            operation = f"unloading LoRA adapter {name!r}"
            answers = await self._utilities.call(operation, "remove_lora", adapter.id)
            if not all(answer is True for answer in answers):
                raise StatusError(StatusCode.INTERNAL, f"{operation} (id {adapter.id}) failed: an engine rejected it")
            self._registry.remove(name)
        return adapter

    def list(self) -> list[LoraRequest]:
        """All loaded adapters, by name. FAILED_PRECONDITION without LoRA."""
        self._check_enabled()
        return self._registry.adapters()

    async def _load(self, name: str, source: str) -> LoraRequest:
        if name in self._served_names:
            raise StatusError(StatusCode.ALREADY_EXISTS, f"LoRA adapter {name!r} has the name of a served model")
        async with self._utilities.change():
            if self._registry.resolve(name) is not None:
                raise StatusError(StatusCode.ALREADY_EXISTS, f"LoRA adapter {name!r} is already loaded")
            adapter = self._registry.reserve(name, source)
            operation = f"loading LoRA adapter {name!r}"
            # vllm.lora.request.LoRARequest is an array on the wire
            request = [adapter.name, adapter.id, adapter.path]
            answers = await self._utilities.call(operation, "add_lora", request, timeout=NO_LIMIT)
            if not all(answer is True for answer in answers):
                raise StatusError(StatusCode.INTERNAL, f"{operation} failed: an engine rejected it")
            self._registry.add(adapter)
        return adapter

    def _check_enabled(self) -> None:
        if not self._engine.capabilities.supports_lora:
            raise StatusError(
                StatusCode.FAILED_PRECONDITION, "the engine was not started with LoRA enabled; start vLLM with --enable-lora"
            )


def _check_names(name: str, source: str) -> None:
    for field, value in (("lora_name", name), ("source_path", source)):
        if not value.strip():
            raise StatusError(StatusCode.INVALID_ARGUMENT, f"{field} {value!r}: it must not be empty")


def allowed_source(source: str, path_prefixes: Iterable[str]) -> str:
    """``source`` as the engines shall have it: a local path resolved, anything else as it is. Reads the file system.

    Local is what is absolute, begins with ``.``, ``..`` or ``~``, or names something that exists here. Raises
    StatusError(INVALID_ARGUMENT) for a local path that is not absolute, not there, or not under one of ``path_prefixes``.
    """
    path = Path(source)
    first = path.parts[0] if path.parts else ""
    if not (source.startswith(("./", "/")) or first in (".", "..") or first.startswith("~") or os.path.lexists(source)):
        return source
    prefixes = tuple(path_prefixes)
    if not prefixes:
        raise _refused(source, f"local paths need {PATH_PREFIXES_VARIABLE} to be set, and it is not")
    if not path.is_absolute():
        raise _refused(source, f"a local path must be absolute and under one of the prefixes of {PATH_PREFIXES_VARIABLE}")
    try:
        resolved = path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise _refused(source, "a local path must exist and be accessible") from error
    if not any(resolved.is_relative_to(Path(prefix).resolve()) for prefix in prefixes):
        raise _refused(source, f"it is under none of the prefixes of {PATH_PREFIXES_VARIABLE}")
    return str(resolved)


def _refused(source: str, problem: str) -> StatusError:
    return StatusError(StatusCode.INVALID_ARGUMENT, f"source_path {source!r}: {problem}")
