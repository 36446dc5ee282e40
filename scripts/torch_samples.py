"""The samples with which torch tests its own operators and modules, through the PyTorch converter and its check.

    pip install expecttest                               # what torch's tests need
    python -m scripts.torch_samples                      # seven minutes; the table, then why what was refused
    python -m scripts.torch_samples --only softmax -v    # those whose names contain this, sample by sample
    python -m scripts.torch_samples --save               # the tables torch-samples and torch-samples-refused

A few samples of each entry count: those where torch itself makes a finite loss and finite gradients. Their floats are
multiplied by parameters, one for each input of an operator, one for all inputs of a module. *wrong* is what the
converter's check finds to be unlike torch's loss and gradients.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scripts.results import Table, save
from tests.support.survivors import Died, answers

COMMAND = "python -m scripts.torch_samples --save"
RIGHT, REFUSED, WRONG, RAISED, DIED = KINDS = ("right", "refused", "wrong", "raised", "died")
INTERNAL = "torch.testing._internal"
Outcome = tuple[str, str]
"""One of `KINDS`, and the message."""


def main() -> int:
    """Print both tables; 1 where anything is wrong, raises or dies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="entries whose names contain this")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=200.0, help="that one entry may take")
    parser.add_argument("--save", action="store_true", help="put the tables among the results")
    parser.add_argument("-v", "--verbose", action="store_true", help="also what is right")
    asked = parser.parse_args()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: dict[str, list[str]] = defaultdict(list)
    jobs = [(kind, number, name) for kind in SIDES for number, name in enumerate(names(kind)) if asked.only in name]
    for (kind, _, name), found in answers(outcomes, jobs, asked.processes, asked.seconds):
        for outcome, message in [(DIED, found.cause)] if isinstance(found, Died) else found:
            counts[kind][outcome] += 1
            if outcome == REFUSED:
                reasons[without_places(message)].append(name)
            if asked.verbose or outcome not in (RIGHT, REFUSED):
                print(f"{name}: {outcome} {message}".rstrip())
    rows = [(kind, *(str(counts[kind][each]) for each in KINDS)) for kind in SIDES]
    by_count = sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0]))
    refused = [(reason, str(len(who)), min(who)) for reason, who in by_count]
    tables = {
        "torch-samples": Table(COMMAND, ("samples of", *KINDS), tuple(rows)),
        "torch-samples-refused": Table(COMMAND, ("refused because", "samples", "one of them"), tuple(refused)),
    }
    for name, table in tables.items():
        print("\n" + table.to_markdown())
        if asked.save:
            save(name, table)
    return int(any(counts[kind][each] for kind in SIDES for each in (WRONG, RAISED, DIED)))


def without_places(message: str) -> str:
    """Return a message without modules, lines and names, so that equal reasons are equal."""
    plain = re.sub(r" in module '[^']*'|at \S+\.py:\d+ `[^`]*`", "", message)
    return re.sub(r"\s+(?=[:,])|(?<=\s)\s+", "", re.sub(r"\(node_\w+\)|'[^']*'", "'_'", plain))


def names(kind: str) -> list[str]:
    """Return the names of torch's entries."""
    return [" ".join(filter(None, (each.name, getattr(each, "variant_test_name", "")))) for each in _entries(kind)]


def outcomes(job: Sequence[Any]) -> list[Outcome]:
    """Convert some samples of an entry, in this process."""
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    kind, number, _ = job
    return [made for step in SIDES[kind](_entries(kind)[number]) if (made := _outcome(*step)) is not None]


def _outcome(model: Any, inputs: tuple[Any, ...]) -> Outcome | None:
    """Convert one step; None where torch has no finite loss and gradients."""
    import torch
    from onnx_remat.converters.pytorch import export_training_step

    from onnx_remat.errors import OnnxRematError

    try:
        loss = model(*inputs)
        loss.backward()
        made = [loss, *(each.grad for each in model.parameters() if each.grad is not None)]
        if not all(torch.isfinite(each).all() for each in made):
            return None
    except Exception:  # no loss, no gradient, or none here: nothing to compare with
        return None
    model.zero_grad()
    try:
        export_training_step(model, inputs, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    except OnnxRematError as error:
        return (WRONG if "the converted step is wrong" in str(error) else REFUSED), str(error)
    except Exception as error:
        return RAISED, f"{type(error).__name__}: {error}".partition("\n")[0]
    return RIGHT, ""


def _entries(kind: str) -> list[Any]:
    module, name = {"operators": ("common_methods_invocations", "op_db"), "modules": ("common_modules", "module_db")}[
        kind
    ]
    return list(getattr(importlib.import_module(f"{INTERNAL}.{module}"), name))


def _of_operator(entry: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield the first, the middle and the last sample of an operator as steps."""
    import torch

    if torch.float32 not in entry.dtypes:
        return
    torch.manual_seed(0)
    for sample in _some(list(entry.sample_inputs("cpu", torch.float32, requires_grad=False)), 3):
        many = isinstance(sample.input, list | tuple)
        given = tuple(sample.input) if many else (sample.input,)
        if all(isinstance(x, torch.Tensor) for x in given):
            held = [*sample.args, *sample.kwargs.values()]

            def call(xs: list[Any], held: list[Any], sample: Any = sample, many: bool = many) -> Any:
                args, rest = held[: len(sample.args)], held[len(sample.args) :]
                return entry.op(xs if many else xs[0], *args, **dict(zip(sample.kwargs, rest, strict=True)))

            yield _step(call, given, held), given


def _of_module(entry: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield four samples of a module in training and in inference as steps."""
    import torch

    for training in (True, False):
        torch.manual_seed(0)
        how = {"device": "cpu", "dtype": torch.float32, "requires_grad": False, "training": training}
        for sample in _some(entry.module_inputs_func(entry, **how), 4):
            try:
                made = entry.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
            except Exception:  # a sample of what the module refuses
                continue
            args, named = sample.forward_input.args, sample.forward_input.kwargs

            def call(xs: list[Any], held: list[Any], made: Any = made, args: Any = args, named: Any = named) -> Any:
                given = [x * xs[0] if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in held]
                return made(*given[: len(args)], **dict(zip(named, given[len(args) :], strict=True)))

            one = (torch.ones(()),)
            yield _step(call, one, [*args, *named.values()], made.train(training)), one


SIDES: dict[str, Callable[[Any], Iterator[tuple[Any, tuple[Any, ...]]]]] = {
    "operators": _of_operator,
    "modules": _of_module,
}
"""What yields the steps of an entry, by kind."""


def _some(samples: list[Any], most: int) -> list[Any]:
    last = len(samples) - 1
    return [samples[i] for i in sorted({last * i // (most - 1) for i in range(most)})] if samples else []


def _step(call: Callable[[list[Any], list[Any]], Any], given: Sequence[Any], held: list[Any], inner: Any = None) -> Any:
    """Return a module of `call`, whose loss weighs every element of every output differently.

    The first argument of `call` are the inputs, of floats their multiples by parameters; the second is `held`, whose
    tensors are buffers.
    """
    import torch
    from torch import nn

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner
            self.factors = nn.ParameterList([nn.Parameter(torch.ones(x.shape)) for x in given if x.is_floating_point()])
            for i, value in enumerate(held):
                if isinstance(value, torch.Tensor):
                    self.register_buffer(f"held{i}", value.detach())

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            factors = iter(self.factors)
            xs = [x * next(factors) if x.is_floating_point() else x for x in inputs]
            values = [getattr(self, f"held{i}") if isinstance(v, torch.Tensor) else v for i, v in enumerate(held)]
            leaves = torch.utils._pytree.tree_leaves(call(xs, values))
            made = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
            weighed = [(x * torch.linspace(0.5, 1.5, max(1, x.numel())).reshape(x.shape)).sum() for x in made]
            return torch.stack(weighed).sum()

    return Step()


if __name__ == "__main__":
    sys.exit(main())
