"""What a checkpoint calls the modules of a model, where that is not what they are called here.

Projections of one input are one module here. Most checkpoints store them one by one, Phi-3's as they are here.

Of experts transformers 5 stores one tensor for all of a layer, as they are here. Most checkpoints store three for each
expert, and Mixtral's have words of their own for these and for the layer. Those of gpt-oss store all experts in one
tensor, too, but outputs are its last dimension, gates and ups by turns: they are put in order when they have been read.

Of models that read images, too, what reads text is served, and its names begin otherwise.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import nn

from tercet.scheduler.models.layers.linear import FusedLinear, Lent
from tercet.scheduler.models.layers.moe import ExpertLinear, Experts
from tercet.scheduler.models.layers.shard import Cut

_TEXT = {"language_model.": "", "model.language_model.": "model."}
"""What stands before names where a model reads images, too, as transformers 4 and 5 have it, and what does here."""
_BESIDE = ".e_score_correction_bias"
"""The end of a name of what scores are corrected by, where it is not the router's."""
_SIGHT = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def text_names(stored: Collection[str]) -> dict[str, str]:
    """The name here of each stored tensor; without those of what reads images."""
    stored = list(stored)
    for prefix, here in _TEXT.items():
        if any(name.startswith(prefix) for name in stored):
            kept = (name for name in stored if not name.startswith(_SIGHT))
            return {name: here + name.removeprefix(prefix) if name.startswith(prefix) else name for name in kept}
    return {name: name for name in stored}


class Place(NamedTuple):
    """The memory that a stored tensor belongs in, and what of the tensor: without a `cut`, all of it."""

    memory: torch.Tensor
    cut: Cut | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(self.memory.shape) if self.cut is None else self.cut.stored_shape(self.memory.shape)

    def held(self, stored: torch.Tensor) -> torch.Tensor:
        """What of the tensor belongs here."""
        return stored if self.cut is None else self.cut.of(stored)


@dataclass(frozen=True)
class FusedNames:
    """Which fused projections one checkpoint stores as one."""

    whole: frozenset[str] = frozenset()
    """The last words of their paths, such as qkv_proj."""

    @classmethod
    def of(cls, stored: Collection[str]) -> "FusedNames":
        """Those that are so in the names of a checkpoint's tensors."""
        return cls(frozenset(".".join(name.split(".")[-2:-1]) for name in stored))

    def parts(self, path: str, linear: FusedLinear) -> dict[str, Cut]:
        """What the projection at `path` is stored as, in the order of its rows: each name, and the rows held of it."""
        parent, _, name = path.rpartition(".")
        if name in self.whole:
            return {path: reduce(lambda above, part: part.below(above), linear.parts.values())}
        return {f"{parent}.{part}": rows for part, rows in linear.parts.items()}


@dataclass(frozen=True)
class ExpertNames:
    """The names of one checkpoint."""

    mlp: str = "mlp"
    parts: tuple[str, str, str] | None = ("gate_proj", "up_proj", "down_proj")
    """Of one expert's projections; None where all experts are in one tensor."""
    router: str = "gate"
    correction: str = ".gate.e_score_correction_bias"
    """How the name of what scores are corrected by ends."""
    by_turns: bool = False
    """Whether gates and ups are stored by turns, and weights in full the other way round."""

    @classmethod
    def of(cls, stored: Collection[str]) -> "ExpertNames":
        """Those that the names of a checkpoint's tensors follow."""
        for name in stored:
            if ".mlp.router." in name or name.endswith(".experts.gate_up_proj_blocks"):
                return cls(parts=None, router="router", by_turns=True)
        beside = any(name.endswith((".mlp" + _BESIDE, ".block_sparse_moe" + _BESIDE)) for name in stored)
        correction = _BESIDE if beside else cls.correction
        for name in stored:
            if name.endswith(".experts.gate_up_proj"):
                return cls(parts=None, correction=correction)
            if ".block_sparse_moe." in name:
                return cls("block_sparse_moe", ("w1", "w3", "w2"), correction=correction)
        return cls(correction=correction)

    def parameter(self, path: str, kind: str) -> str:
        """The name of a parameter of the module at `path`."""
        return f"{path}.{kind}".replace(type(self).correction, self.correction)

    def modules(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Every module of a model and its path in the checkpoint."""
        for path, module in model.named_modules():
            stored = f"{path}.".replace(".mlp.gate.", f".mlp.{self.router}.").replace(".mlp.", f".{self.mlp}.")
            yield stored.removesuffix("."), module

    def tensors(self, path: str, experts: Experts) -> dict[str, Place]:
        """The name of each tensor of the experts at `path`, to where it belongs.

        Where all experts are in one tensor, a weight that has no memory yet is left out: it is read otherwise.
        """
        if self.parts is None:
            return self._in_one(path, experts)
        places: dict[str, Place] = {}
        for linear, dim in ((experts.gate_up_proj, 0), (experts.down_proj, 1)):
            cut = experts.columns.along(dim)
            rows = self.rows(path, experts, linear)
            places |= {f"{prefix}.weight": Place(row, cut) for prefix, row in rows.items()}
        return places

    def _in_one(self, path: str, experts: Experts) -> dict[str, Place]:
        """The same where all experts are in one tensor."""
        gate_up, down = experts.gate_up_proj, experts.down_proj
        rows, columns = self.rows_up(experts).along(1), experts.columns.along(2)
        places: dict[str, Place] = {}
        for name, linear, cut in (("gate_up_proj", gate_up, rows), ("down_proj", down, columns)):
            if linear.bias is not None:
                places[f"{path}.{name}_bias"] = Place(linear.bias.data, cut if linear is gate_up else None)
            if linear.weight.is_meta:
                continue
            whole, turned = Place(linear.weight.data, cut), Place(linear.weight.data.mT, cut.along(3 - cut.dim))
            places[f"{path}.{name}"] = turned if self.by_turns else whole
        return places

    def rows_up(self, experts: Experts) -> Cut:
        """Which rows of one expert's stored gate-and-up tensor are held here."""
        columns = experts.columns
        if self.by_turns:
            return Cut(2 * columns.whole, tuple(range(2 * run.start, 2 * run.stop) for run in columns.runs))
        return columns.below(columns)

    def rows(self, path: str, experts: Experts, linear: ExpertLinear) -> dict[str, torch.Tensor]:
        """The stored parts of `linear`, of the experts at `path`: each name, to its memory [outputs, inputs].

        In the order of memory: expert after expert, gate before up.
        """
        parts = self.parts or ()
        names, pieces = (parts[:2], 2) if linear is experts.gate_up_proj else (parts[2:], 1)
        result: dict[str, torch.Tensor] = {}
        for number, weight in enumerate(linear.weight.data):
            rows = weight.chunk(pieces)
            result |= {f"{path}.{number}.{name}": row for name, row in zip(names, rows, strict=True)}
        return result

    def borrowers(self, path: str, experts: Experts) -> dict[str, Callable[[Lent], None]]:
        """For each stored weight of the experts at `path`, the call that lends it to its linear."""
        if self.parts is None:
            return {
                f"{path}.{name}": partial(self._lend_all, linear)
                for name, linear in (("gate_up_proj", experts.gate_up_proj), ("down_proj", experts.down_proj))
            }
        linears = ((experts.gate_up_proj, 0), (experts.gate_up_proj, 1), (experts.down_proj, 0))
        return {
            f"{path}.{number}.{name}.weight": partial(linear.lend, number, run)
            for number in range(len(experts.down_proj.weight))
            for name, (linear, run) in zip(self.parts, linears, strict=True)
        }

    def _lend_all(self, linear: ExpertLinear, lent: Lent) -> None:
        if self.by_turns:
            lent = lent._replace(rows=lent.rows.transpose(1, 2))
        linear.lend_all(lent, by_turns=self.by_turns)

    def put_in_order(self, model: nn.Module) -> None:
        """Bring gates before ups where they were stored by turns: in biases and in weights in full, once read.

        What is lent comes in order when it is taken.
        """
        for module in model.modules() if self.by_turns else ():
            if isinstance(module, Experts):
                linear = module.gate_up_proj
                weight = None if linear.is_lent else linear.weight.data
                for tensor in (weight, None if linear.bias is None else linear.bias.data):
                    for rows in () if tensor is None or tensor.is_meta else tensor:
                        rows.copy_(in_order(rows))


def in_order(rows: torch.Tensor) -> torch.Tensor:
    """Rows of gates and ups by turns [2 * size, ...], the gates before the ups."""
    return torch.cat([rows[::2], rows[1::2]])
