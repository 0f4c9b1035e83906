"""Runtime of a script that ``labkit script`` wrote: the ranks of torchrun, of which rank 0 also acts as the notebook's process.

In the script, ``%%spmd`` cells are plain code. What the notebook's own process does between them (parameters, folders, tables,
checks of exercises) runs on rank 0, in a separate namespace. Meanwhile the other ranks answer its ``pool.push``, ``pool.pull`` and
``pool.run``.
"""

from __future__ import annotations

import ast
import gc
import io
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from labkit.base.plain_text import name_ranks
from labkit.base.ranks import RankResults, RankSpec, parse_ranks
from labkit.errors import LabkitError
from labkit.spmd.script.cells import future_flags, run_cell, text_of
from labkit.spmd.script.script_pool import ScriptPool, renew

Namespace = dict[str, Any]


class ScriptRankError(LabkitError, RuntimeError):
    """Code that the notebook's own process sent to the ranks failed there.

    Attributes:
        tracebacks: The tracebacks by rank.
    """

    def __init__(self, tracebacks: Mapping[int, str]) -> None:
        self.tracebacks = dict(tracebacks)
        super().__init__("\n".join(f"{name_ranks([rank])}:\n{text}" for rank, text in self.tracebacks.items()))


class Job:
    """One rank of a script; rank 0 is also the notebook's own process.

    Create it with `Job.start`. Ranks: its methods are collective; all ranks call them in the same order.

    Attributes:
        namespace: The rank's namespace, which is the script's own.
        kernel_namespace: The namespace of the notebook's own process; empty on ranks above 0.
    """

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.kernel_namespace: Namespace = {}
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        self.device = torch.device("cuda", self.local_rank) if on_gpu else torch.device("cpu")
        self._generation = 0
        self._has_pool = False
        self._store: Any = None
        self._first_names: set[str] = set()
        self._future = 0  # a __future__ import in a cell of the notebook's own process applies to all later ones

    @classmethod
    def start(cls, namespace: Namespace) -> Job:
        """Form the process group as a pool would, and set ``rank``, ``world_size``, ``local_rank`` and ``device``.

        Args:
            namespace: The script's ``globals()``.

        Raises:
            SystemExit: The script was not started by torchrun, or with arguments.
        """
        if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
            raise SystemExit(f"Start this script with torchrun: torchrun --nproc-per-node 2 {sys.argv[0]}")
        if len(sys.argv) > 1:
            raise SystemExit(
                f"This script takes no arguments, but was given {' '.join(sys.argv[1:])}. Its parameters are in its first cell: "
                "change them there, or write the script again with `labkit script NOTEBOOK -p NAME VALUE`."
            )
        job = cls(namespace)
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        job._store = dist.TCPStore(address, port, is_master=job.rank == 0 and not agent)
        job._form()
        job._first_names = {*namespace, "job", "rank", "world_size", "local_rank", "device"}
        if job.rank == 0:
            job.kernel_namespace = {"__name__": "__main__", "script_pool": job._open_pool}
        return job

    def _form(self) -> None:
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # Otherwise gloo binds to the address that the host name resolves to, which may not exist.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        bound: dict[str, Any] = {}
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            bound["device_id"] = self.device
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
            store=dist.PrefixStore(f"script-{self._generation}", self._store),
            rank=self.rank,
            world_size=self.world_size,
            **bound,
        )
        dist.all_reduce(torch.ones(1, device=self.device))
        names = {"rank": self.rank, "world_size": self.world_size, "local_rank": self.local_rank, "device": self.device}
        self.namespace.update(names)

    # What the script calls --------------------------------------------------------------------------------------------

    def cell(self, name: str) -> None:
        """Announce the cell that runs next. Ranks: printed by rank 0."""
        if self.rank == 0:
            sys.stdout.write(f"--- {name}\n")
            sys.stdout.flush()

    def show(self, value: Any, *, ranks: RankSpec = None) -> None:
        """Print a cell's last expression as the notebook would: for each rank, with equal texts only once, and never None."""
        texts = self._gather(None if value is None else text_of(value), ranks)
        groups: dict[str, list[int]] = {}
        for rank, text in texts.items():
            if text is not None:
                groups.setdefault(text, []).append(rank)
        if self.rank == 0:
            for text, holders in groups.items():
                label = f"{name_ranks(holders)}:" + ("\n" if "\n" in text else " ") if self.world_size > 1 else ""
                sys.stdout.write(f"{label}{text}\n")
            sys.stdout.flush()

    def skip(self, num_ranks: int) -> None:
        """Report that a cell needs more ranks, as ``%%spmd --needs N`` does. Ranks: printed by rank 0."""
        if self.rank == 0:
            sys.stdout.write(f"skipped: this cell needs at least {num_ranks} ranks, the pool has {self.world_size}.\n")

    def keep(self, name: str, value: Any, *, ranks: RankSpec = None) -> None:
        """Give the values of a cell's last expression to the notebook's own process, as ``%%spmd --out NAME`` does."""
        values = self._gather(value, ranks, on_rank_0=True)
        if self.rank == 0:
            self.kernel_namespace[name] = RankResults(values)

    def kernel(self, name: str, source: str, *, parameters: bool = False) -> None:
        """Run a cell of the notebook's own process on rank 0 while the other ranks answer its requests.

        Args:
            name: The cell's id, for tracebacks.
            source: The cell's source.
            parameters: Whether the cell sets the notebook's parameters: ``world_size`` is then set to the real one.
        """
        if self.rank != 0:
            while self._answer():
                pass
            return
        filename = f"<cell {name}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        shown = run_cell(source, filename, self.kernel_namespace, self._future)
        self._future |= future_flags(ast.parse(source))
        if parameters:
            self.kernel_namespace["world_size"] = self.world_size
        if shown is not None:
            sys.stdout.write(text_of(shown) + "\n")
        sys.stdout.flush()
        self._send(None)

    def end(self) -> None:
        """Leave the process group once every rank is done. Ranks: collective."""
        dist.barrier()
        dist.destroy_process_group()

    # Requests from rank 0 to all ranks ------------------------------------------------------------------------------------

    def _open_pool(self, world_size: int | None = None, **_: Any) -> ScriptPool:
        """Stand in for ``labkit.WorkerPool``: return a pool of this job's ranks. If it needs fewer, the last ranks end here."""
        wanted = world_size or self.world_size
        if wanted > self.world_size:
            raise LabkitError(f"the script has {self.world_size} ranks, so it cannot have a pool of {wanted}")
        if self._has_pool or wanted < self.world_size:
            self.ask(renew, wanted)
        self._has_pool = True
        return ScriptPool(self)

    def ask(self, function: Callable[..., Any], *args: Any, ranks: RankSpec = None, **kwargs: Any) -> RankResults[Any]:
        """Call ``function(job, *args, **kwargs)`` on ranks and gather the results. Ranks: rank 0, inside `kernel`.

        Raises:
            ScriptRankError: The function raised an exception on a rank.
        """
        chosen = parse_ranks(ranks, self.world_size)
        message = _pack((function, args, kwargs, chosen))
        self._send(message)
        return RankResults(self._call(message))

    def _answer(self) -> bool:
        """Carry out one request of rank 0 on a rank above 0; return False when rank 0's cell is over."""
        box: list[bytes | None] = [None]
        dist.broadcast_object_list(box)
        if box[0] is None:
            return False
        self._call(box[0])
        return True

    def _send(self, message: bytes | None) -> None:
        dist.broadcast_object_list([message])

    def _call(self, message: bytes) -> dict[int, Any]:
        function, args, kwargs, chosen = cloudpickle.loads(message)
        answer: tuple[bool, Any] = (True, None)
        if self.rank in chosen:
            try:
                answer = (True, function(self, *args, **kwargs))
            except Exception:
                answer = (False, traceback.format_exc())
        # The function may have ended some ranks.
        answers = self._gather(answer, [rank for rank in chosen if rank < self.world_size])
        if failed := {rank: text for rank, (good, text) in answers.items() if not good}:
            raise ScriptRankError(failed)
        return {rank: value for rank, (_, value) in answers.items()}

    def _gather(self, value: Any, ranks: RankSpec, *, on_rank_0: bool = False) -> dict[int, Any]:
        """Gather the values of some ranks, on all ranks or only on rank 0. Ranks: collective."""
        packed: list[bytes] = [b""] * self.world_size
        chosen = parse_ranks(ranks, self.world_size)
        dist.all_gather_object(packed, _pack(value) if self.rank in chosen else b"")
        if on_rank_0 and self.rank != 0:
            return {}
        return {rank: cloudpickle.loads(packed[rank]) for rank in chosen}

    def forget(self) -> None:
        """Forget the variables that cells have made. Ranks: local."""
        for name in set(self.namespace) - self._first_names:
            del self.namespace[name]
        gc.collect()

    def renew(self, world_size: int) -> None:
        """Restart with the first ranks: forget the variables that cells have made, and form a new process group.

        Ranks: collective. For the ranks that are left out, the script ends here, successfully.
        """
        self.forget()
        dist.barrier()
        dist.destroy_process_group()
        if self.rank >= world_size:
            sys.stdout.flush()
            raise SystemExit(0)
        self._generation, self.world_size = self._generation + 1, world_size
        os.environ["WORLD_SIZE"] = str(world_size)
        self._form()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """A pickler that moves tensors to the CPU and detaches results of computations."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and (obj.device.type != "cpu" or (obj.requires_grad and not obj.is_leaf)):
            return obj.detach().cpu().__reduce_ex__(2)
        return super().reducer_override(obj)


def _pack(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()
