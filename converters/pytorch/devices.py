"""Modules on a GPU: they are exported on the host, and trained where they lie."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from onnx_remat.errors import ConversionError
from onnx_remat.session.device_arrays import ALIGNMENT

from .arrays import view
from .outside import check_tensors_apart
from .private_state import pytree

HOST = torch.device("cpu")


def device_of(model: torch.nn.Module) -> torch.device:
    """Return the device of a module: the host, or the first CUDA device.

    Raises
    ------
    ConversionError
        Its tensors are on several devices, or on one that no session runs on.
    """
    found: dict[torch.device, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found.setdefault(tensor.device, name)
    if len(found) > 1:
        (one, first), (other, second), *_ = found.items()
        raise ConversionError(f"{first} is on {one} and {second} on {other}: move the module to one, model.to({one})")
    for device, name in found.items():
        if device.type == "cuda" and device.index:
            raise ConversionError(
                f"{name} is on {device}, and sessions run on the first device that they see: start Python with "
                f"CUDA_VISIBLE_DEVICES={device.index}"
            )
        if device.type not in ("cpu", "cuda"):
            raise ConversionError(f"{name} is on {device}: a step runs on the CPU or on CUDA; call model.cpu() first")
    return next(iter(found), HOST)


def check_cuda() -> None:
    """Raise ModelError unless ONNX Runtime has CUDA here, before a step is planned for it."""
    from onnx_remat.ort import runtime  # takes memory, which a step on the CPU does not need

    runtime.check_device("CUDAExecutionProvider")


def readable(tensor: torch.Tensor) -> Any:
    """Return a contiguous tensor as a session reads it: as a numpy array, or on a device as a tensor without history.

    Both have the memory of the tensor; bfloat16 as its bits.
    """
    if tensor.device == HOST:
        return view(tensor)
    tensor = tensor.detach()
    return tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor


def fits(tensor: torch.Tensor) -> bool:
    """Return whether a session reads a tensor where it lies: in one piece, on a device at a multiple of some bytes."""
    return tensor.is_contiguous() and (tensor.device == HOST or tensor.data_ptr() % ALIGNMENT == 0)


def in_one_piece(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that a session can read, a copy if this one does not fit."""
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor if fits(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def own_tensors(model: torch.nn.Module, loss: Any, users: Sequence[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Return the tensors of module, loss and optimizers, each once, by a name for messages."""
    found = [*model.named_parameters(), *model.named_buffers()]
    if isinstance(loss, torch.nn.Module):
        found += [(f"the loss's {name}", each) for name, each in [*loss.named_parameters(), *loss.named_buffers()]]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for user in users:
        for parameter, pieces in user.state.items():
            if whose := names.get(id(parameter)):
                found += [
                    (f"{slot} of {whose}", each) for slot, each in pieces.items() if isinstance(each, torch.Tensor)
                ]
    made: dict[int, tuple[str, torch.Tensor]] = {}
    for name, each in found:
        made.setdefault(id(each), (name, each))
    return dict(made.values())


def batch_on(batch: Any, device: torch.device) -> Any:
    """Return a batch of the same structure with its tensors on a device."""

    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    if isinstance(batch, torch.Tensor):
        return move(batch)
    return pytree.tree_map(move, dict(batch) if isinstance(batch, Mapping) else tuple(batch))


@contextmanager
def on_host(tensors: Mapping[str, torch.Tensor], device: torch.device) -> Iterator[None]:
    """Move tensors to the host, and back to their devices in the end; they stay the same objects.

    Within the block ``torch.autocast("cuda")`` computes on the host in the type that it would use on the device.

    Raises
    ------
    UsageError
        Two of them share memory, which they would not do afterwards.
    """
    if device == HOST:
        yield
        return
    check_tensors_apart(tensors, tensors)
    before = {name: tensor.device for name, tensor in tensors.items()}
    with ExitStack() as back:
        for name, tensor in tensors.items():
            back.callback(_move, tensor, before[name])
            _move(tensor, HOST)
        with _autocast_on_host():
            yield


def kept_on_host(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return tensors, each with a copy of its value on the host, for `restored`."""
    return [(tensor, tensor.detach().to(HOST, copy=True)) for tensor in tensors]


def restored(kept: Collection[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Let tensors have their values again after an error, and return whether they do.

    After some errors a device does nothing more.
    """
    try:
        for device in {tensor.device for tensor, _ in kept} - {HOST}:
            torch.cuda.synchronize(device)  # a session may have launched kernels before the error
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)
    except Exception:  # the one before is the cause
        return False
    return True


def release_memory(device: torch.device) -> None:
    """Give back what PyTorch's allocator keeps of a device: sessions do not allocate by it."""
    if device != HOST:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def in_one_chunk(model: torch.nn.Module) -> None:
    """Let the weights of each recurrent layer lie in one piece again, as cuDNN wants them."""
    for module in model.modules():
        if isinstance(module, torch.nn.RNNBase):
            module.flatten_parameters()


def _move(tensor: torch.Tensor, device: torch.device) -> None:
    gradient = tensor.grad if tensor.is_leaf else None
    tensor.data = tensor.data.to(device)
    if gradient is not None:
        gradient.data = gradient.data.to(device)


_IN_FLOAT32 = (
    "__pow__", "__rdiv__", "__rpow__", "__rtruediv__", "acos", "asin", "binary_cross_entropy_with_logits",
    "cdist", "cosh", "cosine_embedding_loss", "cosine_similarity", "cross_entropy", "cumprod", "cumsum", "dist",
    "erfinv", "exp", "expm1", "group_norm", "hinge_embedding_loss", "kl_div", "l1_loss", "layer_norm", "log",
    "log10", "log1p", "log2", "log_softmax", "logsumexp", "margin_ranking_loss", "mse_loss",
    "multi_margin_loss", "multilabel_margin_loss", "nll_loss", "norm", "normalize", "pdist", "poisson_nll_loss",
    "pow", "prod", "reciprocal", "renorm", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss", "softmax",
    "softmin", "softplus", "sum", "tan", "triplet_margin_loss",
)  # fmt: skip
"""Functions that ``torch.autocast`` computes in float32 on CUDA: "CUDA Ops that can autocast to float32" in PyTorch's
documentation of automatic mixed precision."""


class _ListOfCuda(TorchFunctionMode):
    """Compute in float32 what autocast does on CUDA: the host's own list is another."""

    def __init__(self) -> None:
        super().__init__()
        homes = (torch, torch.Tensor, torch.nn.functional, torch.special)
        found = (getattr(home, name, None) for home in homes for name in _IN_FLOAT32)
        self._wide = {function for function in found if callable(function)}

    def __torch_function__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        if function not in self._wide or not torch.is_autocast_enabled("cpu"):
            return function(*arguments, **(named or {}))
        arguments, named = pytree.tree_map(_widened, (tuple(arguments), dict(named or {})))
        with torch.autocast("cpu", enabled=False):
            return function(*arguments, **(named or {}))


def _widened(value: Any) -> Any:
    is_narrow = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_narrow else value


@contextmanager
def _autocast_on_host() -> Iterator[None]:
    """Let autocast for the device compute on the host in the types that it would use there."""
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
    entered: list[tuple[bool, _ListOfCuda]] = []

    def enter_here(self: torch.autocast) -> Any:
        entered.append((self.device == "cuda", _ListOfCuda()))
        if self.device == "cuda":
            self.device = "cpu"
        made = enter(self)
        entered[-1][1].__enter__()
        return made

    def leave_here(self: torch.autocast, *error: Any) -> Any:
        moved_here, mode = entered.pop()
        mode.__exit__(*error)
        try:
            return leave(self, *error)
        finally:
            if moved_here:
                self.device = "cuda"

    torch.autocast.__enter__, torch.autocast.__exit__ = enter_here, leave_here  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__, torch.autocast.__exit__ = enter, leave  # type: ignore[method-assign]
