"""The PyTorch converter: interface, numbers, training curves, odd models and refusals."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import torch.nn.functional as F  # noqa: E402
from onnx_remat.converters.checks import agreement as check  # noqa: E402
from onnx_remat.converters.pytorch import export_training_step, initial_feeds  # noqa: E402
from onnx_remat.converters.pytorch.batch import Batch  # noqa: E402
from onnx_remat.converters.pytorch.decisions import Recorder  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint, checkpoint_sequential  # noqa: E402

from onnx_remat import rewrite_model  # noqa: E402
from onnx_remat.errors import ConversionError, ModelError, UsageError  # noqa: E402
from onnx_remat.ort import runtime  # noqa: E402
from onnx_remat.training import Loop  # noqa: E402
from sample_models.networks import forward_models  # noqa: E402
from sample_models.networks.torch_models import Case  # noqa: E402
from tests.support import torch_battery  # noqa: E402
from tests.support.slow import few  # noqa: E402


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 3, 8, 8, generator=generator), torch.randint(0, 10, (6,), generator=generator)


def labels(model, key):
    return [next((p.value for p in node.metadata_props if p.key == key), None) for node in model.graph.node]


def modules(model, phase):
    return {path for path, where in zip(labels(model, "module"), labels(model, "phase"), strict=True) if where == phase}


def error(model):
    return float(checked(model)["error"])


def checked(model):
    return {p.key.removeprefix("check."): p.value for p in model.metadata_props if p.key.startswith("check.")}


def test_interface_labels_and_standard_ops():
    step = export_training_step(net(), batch(), F.cross_entropy)
    onnx.checker.check_model(step, full_check=True)
    inputs = [value.name for value in step.graph.input]
    assert inputs == [
        "0.weight", "0.bias", "1.weight", "1.bias", "5.weight", "5.bias", "1.running_mean", "1.running_var",
        "1.num_batches_tracked", "input.0", "input.1",
    ]  # fmt: skip
    assert [value.name for value in step.graph.output] == [
        "loss", "grad.0.weight", "grad.0.bias", "grad.1.weight", "grad.1.bias", "grad.5.weight", "grad.5.bias",
        "new.1.running_mean", "new.1.running_var", "new.1.num_batches_tracked",
    ]  # fmt: skip
    assert {node.domain for node in step.graph.node} == {""}
    assert set(labels(step, "phase")) == {"forward", "backward"}
    assert modules(step, "forward") == {"0", "1", "2", "3", "4", "5", None}  # None: the loss
    assert modules(step, "backward") == {"0", "1", "2", "3", "5", None}
    paths = zip(step.graph.node, labels(step, "module"), strict=True)
    assert [path for node, path in paths if node.op_type == "Conv"] == ["0", "0"]
    assert all(max(tensor.dims, default=1) <= 64 for tensor in step.graph.initializer)  # no tensor of zeros
    shaped = {info.name for info in step.graph.value_info} | {info.name for info in step.graph.output}
    assert all(name in shaped for node in step.graph.node for name in node.output if name)
    assert error(step) < 1e-5


@pytest.mark.parametrize("opset", [13, 17, 99])
def test_an_opset_that_the_exporter_does_not_know_is_refused(opset):
    with pytest.raises(UsageError, match=f"^opset {opset} is not supported: use 18 to "):
        export_training_step(net(), batch(), F.cross_entropy, opset=opset)


def test_two_tensors_of_a_batch_with_one_name_are_refused():
    x = torch.ones(2)
    with pytest.raises(UsageError, match=r"the batch has 'x\.y' twice"):
        Batch.of({"x": {"y": x}, "x.y": x})


@pytest.mark.parametrize("name", few(["fft", "erf_inv"], ["fft"]))
def test_a_failed_export_leaves_no_labels_behind(name):
    with pytest.raises(ConversionError):
        torch_battery.export([name])
    step = export_training_step(nn.Sequential(nn.Linear(3, 2)), (torch.ones(2, 3), torch.zeros(2, 2)), F.mse_loss)
    assert set(labels(step, "module")) == {"0", None}


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_twenty_steps_follow_torch(kind):
    model = net()
    others = [*model[1].parameters(), *model[5].parameters()]
    groups = [{"params": model[0].parameters()}, {"params": others, "lr": 0.02}]
    make = {
        "sgd": lambda: torch.optim.SGD(groups, 0.05, momentum=0.9, weight_decay=1e-3),
        "adamw": lambda: torch.optim.AdamW(groups, 0.01),
    }
    optimizer = make[kind]()
    step = export_training_step(model, batch(), F.cross_entropy, optimizer)
    assert set(labels(step, "phase")) == {"forward", "backward", "optimizer"}
    feeds = initial_feeds(step, model, optimizer)
    ours, theirs = [], []
    for seed in range(20):
        x, y = batch(seed)
        made = runtime.outputs(step, {**feeds, "input.0": x.numpy(), "input.1": y.numpy()})
        feeds = {name.removeprefix("new."): value for name, value in made.items() if name.startswith("new.")}
        ours.append(float(made["loss"]))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        theirs.append(loss.item())
    np.testing.assert_allclose(ours, theirs, rtol=2e-3 if kind == "adamw" else 2e-4)
    assert int(feeds["1.num_batches_tracked"]) == 20


@pytest.mark.parametrize("kind", few([torch.optim.SGD, torch.optim.AdamW], [torch.optim.AdamW]))
@pytest.mark.parametrize("of_its_own", few([False, True], [True]))
def test_a_learning_rate_that_is_a_tensor_is_an_input(kind, of_its_own):
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 10))
    rate = torch.tensor(0.05)
    last = {"params": model[2].parameters(), "lr": torch.tensor(0.02) if of_its_own else rate, "weight_decay": 0.1}
    optimizer = kind([{"params": model[0].parameters()}, last], rate)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
    x, y = torch.randn(8, 16), torch.randint(0, 10, (8,))
    step = export_training_step(model, (x, y), F.cross_entropy, optimizer)
    rates = ["learning_rate.0", "learning_rate.1"] if of_its_own else ["learning_rate"]
    assert [v.name for v in step.graph.input][-len(rates) - 2 :] == [*rates, "input.0", "input.1"]
    feeds = initial_feeds(step, model, optimizer)
    for _ in range(5):
        feeds |= {name: value for name, value in initial_feeds(step, model, optimizer).items() if name in rates}
        made = runtime.outputs(step, {**feeds, "input.0": x.numpy(), "input.1": y.numpy()})
        feeds |= {name.removeprefix("new."): value for name, value in made.items() if name.startswith("new.")}
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    assert float(feeds[rates[0]]) == pytest.approx(0.0005)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(feeds[name], parameter.detach().numpy(), rtol=2e-5, atol=2e-6)


def test_the_file_says_how_many_outputs_rounding_decides(monkeypatch):
    monkeypatch.setattr("onnx_remat.converters.checks.tolerances.EXACT_ABOVE", 0.0)
    normed = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)]
    without = [nn.Conv2d(3, 8, 3, bias=False), *normed[1:]]
    found = [checked(export_training_step(nn.Sequential(*m), batch(), F.cross_entropy)) for m in (normed, without)]
    assert [each["undetermined"] for each in found] == ["1", "0"]  # BatchNorm takes the bias out again
    assert all(0 < float(each[f"{whose}_error"]) < 1e-5 for each in found for whose in ("exact", "framework"))


def test_feeds_carry_the_state_of_a_running_optimizer():
    model = nn.Linear(8, 10)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    x, y = torch.randn(6, 8), torch.randint(0, 10, (6,))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    step = export_training_step(model, (x, y), F.cross_entropy, optimizer)  # its check starts from that state
    feeds = initial_feeds(step, model, optimizer)
    assert float(feeds["state.weight.step"]) == 1.0 and np.abs(feeds["state.weight.exp_avg"]).max() > 0


def test_the_step_can_be_rewritten_to_a_budget(tmp_path):
    layers = [m for _ in range(6) for m in (nn.Linear(64, 64), nn.GELU())]
    x = torch.randn(512, 64)
    model = nn.Sequential(*layers)
    step = export_training_step(model, (x, x), F.mse_loss, torch.optim.SGD(model.parameters(), 0.1))
    onnx.save(step, tmp_path / "step.onnx")
    report = rewrite_model(tmp_path / "step.onnx", "70%", effort=0.5, run_by="session").report
    assert report.after.total <= report.budget


class Odd(nn.Module):
    """Tied and frozen weights, dropout, an unused parameter, keyword input, its own loss."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.head = nn.Linear(16, 12, bias=False)
        self.head.weight = self.embed.weight
        self.middle = nn.Linear(16, 16)
        self.middle.bias.requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens, labels):
        hidden = F.dropout(torch.tanh(self.middle(self.embed(tokens))), 0.25, self.training)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def test_tied_frozen_unused_keyword_inputs_and_dropout():
    tokens = torch.randint(0, 12, (8, 40))
    step = export_training_step(Odd(), {"tokens": tokens, "labels": tokens.roll(1, 1)})
    assert [v.name for v in step.graph.input] == ["embed.weight", "middle.weight", "middle.bias", "tokens", "labels"]
    assert [v.name for v in step.graph.output] == ["loss", "grad.embed.weight", "grad.middle.weight"]
    assert [node.op_type for node in step.graph.node].count("Dropout") == 1
    assert error(step) < 1e-5


@pytest.mark.slow
def test_the_state_of_a_loop_goes_back_where_tensors_are_tied_or_unread():
    """As the page on PyTorch shows it."""
    torch.manual_seed(0)
    model, tokens = Odd(), torch.randint(0, 12, (8, 40))
    given = {"tokens": tokens, "labels": tokens.roll(1, 1)}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = export_training_step(model, given, None, optimizer)
    loop = Loop(step, initial_feeds(step, model, optimizer) | {name: value.numpy() for name, value in given.items()})
    loop.step()
    state = {name: torch.from_numpy(array) for name, array in loop.state().items()}
    model.load_state_dict(state, strict=False)
    assert torch.equal(model.head.weight, state["embed.weight"]) and model.head.weight is model.embed.weight


class Picks(nn.Module):
    """A loss of what a function makes of a table and indices."""

    def __init__(self, function):
        super().__init__()
        self.table, self.function = nn.Parameter(torch.rand(4, 6)), function

    def forward(self, index):
        return self.function(self.table, index).square().mean()


REFUSES_NEGATIVE = {
    "embedding": lambda w, i: F.embedding(i, w),
    "embedding of int32": lambda w, i: F.embedding(i.int(), w),
    "embedding_bag": lambda w, i: F.embedding_bag(i, w),
    "cross_entropy": lambda w, i: F.cross_entropy(w, i[:, 0]),
    "nll_loss": lambda w, i: F.nll_loss(w, i[:, 0]),
    "gather": lambda w, i: w.gather(1, i),
    "scatter": lambda w, i: torch.scatter(torch.zeros(4, 6), 1, index=i, src=w[:, :3]),
    "scatter_add_": lambda w, i: torch.zeros(4, 6).scatter_add_(1, i, w[:, :3]),
    "index_select": lambda w, i: w.index_select(1, i[0]),
    "index_add": lambda w, i: torch.zeros(4, 6).index_add(1, i[0], w[:, :3]),
}


@pytest.mark.parametrize(
    "name", few(REFUSES_NEGATIVE, ["cross_entropy", "embedding of int32", "gather", "scatter_add_"])
)
def test_a_negative_index_that_torch_refuses_stops_the_step(name):
    """ONNX would count it from the end."""
    model, index = Picks(REFUSES_NEGATIVE[name]), torch.tensor([[0, 1, 2], [2, 3, 0], [3, 1, 2], [1, 2, 0]])
    step = export_training_step(model, (index,))
    assert [node.op_type for node in step.graph.node].count("Mod") == 1  # all that it costs
    feeds = initial_feeds(step, model) | {"input.0": index.numpy()}
    np.testing.assert_allclose(runtime.outputs(step, feeds)["loss"], model(index).item(), rtol=1e-6)
    index[0, 0] = -1
    with pytest.raises((IndexError, RuntimeError)):
        model(index)
    with pytest.raises(ModelError, match=r"running (Gather|Scatter)\w* node"):
        runtime.outputs(step, feeds | {"input.0": index.numpy()})


@pytest.mark.parametrize(
    "function",
    [
        lambda w, i: w[i],
        lambda w, i: torch.take_along_dim(w, i, 1),
        lambda w, i: F.cross_entropy(w, i[:, 0], ignore_index=-1),
        lambda w, i: F.nll_loss(w, i[:, 0], ignore_index=-1),
    ],
)
def test_a_negative_index_that_torch_takes_stays(function):
    model, index = Picks(function), torch.tensor([[0, 1, 2], [2, 3, 0], [3, 1, 2], [1, 2, 0]])
    step = export_training_step(model, (index,))
    index[0, 0] = -1
    feeds = initial_feeds(step, model) | {"input.0": index.numpy()}
    np.testing.assert_allclose(runtime.outputs(step, feeds)["loss"], model(index).item(), rtol=1e-6)


@pytest.mark.parametrize("ignored", few([-100, 2, 255], [255]))
def test_classes_of_8_bits_are_numbers_without_a_sign(ignored):
    model = Picks(lambda w, i: F.cross_entropy(w, i, ignore_index=ignored))
    classes = torch.tensor([0, 2, 3, 5 if ignored < 255 else 255], dtype=torch.uint8)
    step = export_training_step(model, (classes,))
    feeds = initial_feeds(step, model) | {"input.0": classes.numpy()}
    np.testing.assert_allclose(runtime.outputs(step, feeds)["loss"], model(classes).item(), rtol=1e-6)


@pytest.mark.parametrize("kind", [torch.int8, torch.int16, torch.int32])
def test_classes_of_a_type_that_torch_refuses_are_refused(kind):
    model = Picks(F.cross_entropy)
    with pytest.raises(ConversionError, match=rf"^the numbers of classes are {kind}, .*: use target.long\(\)$"):
        export_training_step(model, (torch.tensor([0, 2, 3, 1], dtype=kind),), check=False)


BAGS = {
    "sum": lambda w, i: F.embedding_bag(i, w, mode="sum", padding_idx=1),
    "mean": lambda w, i: F.embedding_bag(i, w, mode="mean", padding_idx=1),
    "max": lambda w, i: F.embedding_bag(i, w, mode="max", padding_idx=1),
    "ragged sum": lambda w, i: F.embedding_bag(i.flatten(), w, torch.tensor([0, 3, 3, 7]), mode="sum", padding_idx=-3),
    "ragged mean": lambda w, i: F.embedding_bag(i.flatten(), w, torch.tensor([0, 3, 3, 7]), padding_idx=-3),
    "shortened": lambda w, i: F.embedding_bag(i, w, mode="sum", max_norm=0.7),
}


@pytest.mark.parametrize("name", few(BAGS, ["max", "ragged mean"]))
def test_bags_leave_out_their_padding(name):
    index = torch.tensor([[1, 1, 1], [1, 3, 1], [0, 2, 3], [2, 1, 2]])  # of the first bag nothing is left
    step = export_training_step(Picks(BAGS[name]), (index,))  # checked
    assert "grad.table" in [value.name for value in step.graph.output]


def test_indices_that_are_known_cost_nothing():
    model = Picks(lambda w, i: F.embedding(torch.arange(3), w) + i)
    step = export_training_step(model, (torch.randn(3, 6),))
    assert "Mod" not in [node.op_type for node in step.graph.node]


def test_a_batch_of_any_size():
    dims = {"input.0": {0: "batch"}, "input.1": {0: "batch"}}
    model = net()
    step = export_training_step(model, batch(), F.cross_entropy, dynamic_dims=dims)
    assert step.graph.input[-1].type.tensor_type.shape.dim[0].dim_param == "batch"
    feeds = initial_feeds(step, model)
    x, y = torch.randn(3, 3, 8, 8), torch.randint(0, 10, (3,))
    made = runtime.outputs(step, {**feeds, "input.0": x.numpy(), "input.1": y.numpy()})
    assert abs(float(made["loss"]) - F.cross_entropy(model(x), y).item()) < 1e-5


def test_pooling_channels_last_images_moves_no_data():
    x, y = batch()
    step = export_training_step(
        nn.Conv2d(3, 8, 3), (x, y), lambda o, _: F.adaptive_avg_pool2d(o.permute(0, 3, 1, 2), 1).square().mean()
    )  # ConvNeXt and Swin end so; torch states the mean's strides again
    assert not {"Gather", "GatherElements", "ScatterElements"} & {node.op_type for node in step.graph.node}
    assert error(step) < 1e-5


@pytest.mark.parametrize("mode", few(["nearest", "bilinear", "bicubic"], ["bicubic"]))
def test_resizing_scatters_nothing_and_keeps_nothing_the_size_of_a_batch(mode):
    pytest.importorskip("onnxruntime")
    from onnx_remat.ort.executed import as_executed
    from onnx_remat.ort.kernels.cpu import CPU
    from onnx_remat.ort.prepare import Preparation
    from onnx_remat.session.prediction import predict

    first = nn.Conv2d(3, 4, 3)
    step = export_training_step(
        first, (torch.randn(16, 3, 26, 26), torch.randn(16, 4, 48, 48)),
        lambda made, target: F.mse_loss(F.interpolate(made.tanh(), scale_factor=2, mode=mode), target),
    )  # fmt: skip
    assert not {"GatherND", "ScatterElements", "ScatterND"} & {node.op_type for node in step.graph.node}
    assert predict(as_executed(step, None, "all", Preparation(CPU))).weights < 40_000  # of a batch of images: 590 kB
    assert error(step) < 1e-5


class AsksWhetherItIsExported(nn.Linear):
    def forward(self, x):
        assert torch.compiler.is_compiling() or float(x.sum()) < 1e9  # as transformers' masks do
        return super().forward(x)


def test_gradients_of_convolutions_need_no_columns_and_no_image_sized_kernels():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(
                nn.Conv2d(3, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 20, (3, 2), dilation=(2, 1), padding=1),
                nn.Tanh(), nn.Conv2d(20, 16, 3, groups=4), nn.Tanh(), nn.ConvTranspose2d(16, 24, 2), nn.Tanh(),
                nn.Conv2d(24, 8, 3, stride=2, padding=1, bias=False),
            )  # fmt: skip

        def forward(self, x):
            return self.layers(x).square().mean()

    step = export_training_step(Net(), (torch.randn(2, 3, 24, 23),))
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in step.graph.value_info}
    shapes |= {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in step.graph.input}
    backward = [n for n in step.graph.node if any(p.key == "phase" and p.value == "backward" for p in n.metadata_props)]
    # The strided one keeps its transposed convolution; three channels or groups keep a convolution for the weight.
    assert [n.op_type for n in backward].count("ConvTranspose") == 1
    kernels = sorted(shapes[n.input[1]][2:] for n in backward if n.op_type == "Conv")
    assert [k for k in kernels if k[0] > 3] == [[20, 22], [24, 23]]


def test_models_know_that_they_are_exported():
    model = AsksWhetherItIsExported(4, 4)
    assert error(export_training_step(model, (torch.randn(4, 4), torch.zeros(4, 4)), F.mse_loss)) < 1e-5


class Autocast(nn.Module):
    def __init__(self, model, dtype):
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, x):
        with torch.autocast("cpu", self.dtype):
            return self.model(x).float()


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.enter, self.block, self.reentrant = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU()), reentrant

    def forward(self, x):
        x = self.enter(x)
        if self.reentrant is None:
            return self.block(x)
        x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return x + 0 * checkpoint_sequential(self.block, 2, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", few([True, False], [True]))
def test_checkpointed_regions_are_traced_once(reentrant):
    torch.manual_seed(0)
    model, x, y = Checkpointed(reentrant), torch.randn(4, 8), torch.randn(4, 8)
    step = export_training_step(model, (x, y), F.mse_loss)
    F.mse_loss(model(x), y).backward()  # torch's checkpoints are as they were
    made = runtime.outputs(step, initial_feeds(step, model) | {"input.0": x.numpy(), "input.1": y.numpy()}, "all")
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(made[f"grad.{name}"], parameter.grad.numpy(), atol=1e-6)
    assert [node.op_type for node in step.graph.node].count("Gelu") == 2


@pytest.mark.parametrize("given", few([torch.float32, torch.float64], [torch.float32]))
@pytest.mark.parametrize("computed", few([torch.float32, torch.float64], [torch.float64]))
def test_rates_that_are_tensors_are_as_wide_as_the_parameters(given, computed):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(computed)
    optimizer = torch.optim.AdamW(model.parameters(), torch.tensor(1e-2, dtype=given))
    batch = torch.randn(4, 4, dtype=computed), torch.zeros(4, 4, dtype=computed)
    step = export_training_step(model, batch, F.mse_loss, optimizer)
    rate = initial_feeds(step, model, optimizer)["learning_rate"]
    assert rate.dtype.name == str(computed).removeprefix("torch.")
    assert rate == np.array(optimizer.param_groups[0]["lr"], rate.dtype)


@pytest.mark.parametrize("kind", few(["float64", "float16", "bfloat16", "autocast"], ["bfloat16", "autocast"]))
def test_other_precisions(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 10))
    x, y = torch.randn(8, 16), torch.randint(0, 10, (8,))
    if kind == "autocast":
        model = Autocast(model, torch.bfloat16)
    else:
        model, x = model.to(getattr(torch, kind)), x.to(getattr(torch, kind))
    step = export_training_step(model, (x, y), F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    kinds = {info.type.tensor_type.elem_type for info in step.graph.value_info}
    wanted = {"float64": 11, "float16": 10}.get(kind, 16)
    assert wanted in kinds
    assert error(step) < {"float64": 1e-12, "float16": 5e-3}.get(kind, 3e-2)
    if wanted == 16:  # written all the same: a GPU has the kernels
        with pytest.raises(
            ModelError, match=r"Gemm.*CPU lacks many kernels for bfloat16: convert in float32, or .*'cuda'"
        ):
            rewrite_model(step, "90%")


class Started(nn.Module):
    """Adds tensors that are made without a type."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        whole = torch.zeros(3) + torch.ones(3) + torch.full((3,), 0.5)
        return self.linear(x) * (whole + torch.arange(0.0, 3.0) + torch.linspace(0, 1, 3) + torch.randn(3))


def test_tensors_made_without_a_type_have_the_default_one():
    try:
        torch.set_default_dtype(torch.float64)
        step = export_training_step(Started(), (torch.randn(5, 4), torch.zeros(5).long()), F.cross_entropy)
    finally:
        torch.set_default_dtype(torch.float32)
    assert error(step) < 1e-12


def test_kernels_that_float64_lacks_are_said_to_be_of_float64():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)).double()
    batch = torch.randn(2, 1, 4, 4, dtype=torch.float64), torch.zeros(2).long()
    with pytest.raises(ModelError, match=r"Conv.*lacks many kernels for float64: convert in float32"):
        export_training_step(model, batch, F.cross_entropy)


DISTRIBUTIONS = {
    "StudentT": lambda p: torch.distributions.StudentT(p + 1, p, p),
    "NegativeBinomial": lambda p: torch.distributions.NegativeBinomial(p + 1, logits=p),
    "Gamma": lambda p: torch.distributions.Gamma(p, p + 1),
    "Beta": lambda p: torch.distributions.Beta(p, p + 1),
    "Poisson": lambda p: torch.distributions.Poisson(p),
}


@pytest.mark.parametrize("kind", few(DISTRIBUTIONS, ["Gamma"]))
def test_distributions_by_the_gamma_function(kind):
    """Their likelihoods, and their entropies where these have derivatives of it."""

    def loss(made, target):
        of = DISTRIBUTIONS[kind](F.softplus(made) + 0.1)
        extra = of.entropy().mean() if kind in ("Beta", "Gamma", "StudentT") else 0
        return extra - of.log_prob(target / 10 if kind == "Beta" else target).mean()

    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(16, 4)
    assert error(export_training_step(model, (x, torch.randint(1, 9, (16, 3)).float()), loss)) < 1e-5


@pytest.mark.slow
def test_gamma_functions_on_both_sides_of_zero():
    def loss(made, target):
        x = made * 5
        return (torch.lgamma(x) + 0.01 * torch.digamma(x) * target).mean()

    torch.manual_seed(0)
    model, x = nn.Linear(4, 3).double(), torch.randn(16, 4, dtype=torch.float64)
    export_training_step(model, (x, torch.randn(16, 3, dtype=torch.float64)), loss)


@pytest.mark.slow
def test_places_in_sorted_sequences():
    class Binned(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.linear = nn.Embedding(8, 4), nn.Linear(4, 3)
            self.register_buffer("edges", torch.linspace(-1, 1, 7))

        def forward(self, x):
            ends = x.sort(1).values[:, 1:]
            order = self.edges.flip(0).argsort()
            places = [
                torch.bucketize(x, self.edges), torch.bucketize(x, self.edges, right=True),
                torch.searchsorted(self.edges, x, side="right"), torch.searchsorted(ends, x, out_int32=True),
                torch.searchsorted(self.edges.flip(0), x, sorter=order),
            ]  # fmt: skip
            return self.linear(sum(self.rows(place) * weight for weight, place in enumerate(places, 1)).sum(1))

    torch.manual_seed(0)
    x = (torch.randn(16, 4) * 3).round() / 3  # on the edges, too
    export_training_step(Binned(), (x, torch.randint(0, 3, (16,))), F.cross_entropy)


def refused(match, *args, kind=ConversionError, **kwargs):
    with pytest.raises(kind, match=match):
        export_training_step(*args, **kwargs)


def test_refusals_say_why():
    x, y = batch()
    refused("not the scalar loss|not a scalar loss", net(), x)
    refused("not a scalar loss: reduce it", net(), (x, y), lambda o, t: F.cross_entropy(o, t, reduction="none"))
    refused("returned float, not", net(), (x, y), lambda o, t: 1.0)
    refused("depends on no trainable parameter", net().requires_grad_(False), (x, y), F.cross_entropy)
    refused("depends on no trainable parameter", net(), (x, y), lambda o, t: o.detach().mean())
    for switched_off in (torch.no_grad, torch.inference_mode):
        with switched_off():
            refused("gradients are switched off: .*outside torch.no_grad", net(), (x, y), F.cross_entropy)
    whole = nn.Linear(2, 2)
    whole.register_parameter("table", nn.Parameter(torch.arange(3), requires_grad=False))
    refused("parameter table is torch.int64", whole, torch.randn(2, 2), None)
    whole = net()
    whole.register_buffer("table", torch.ones(2, dtype=torch.complex64))
    refused("buffer table holds complex numbers.*view_as_real", whole, (x, y), F.cross_entropy)
    refused("input.1 holds complex numbers.*view_as_real", net(), (x, y * 1j), lambda o, t: o.mean() * t.real.mean())
    model = net()
    for rate in (0.0, torch.tensor(0.0), 1e-12, 0.1):  # a warm-up begins at 0
        dampened = torch.optim.SGD(model.parameters(), rate, momentum=0.9, dampening=0.5)
        refused("SGD differs from all others .*take one step in torch", model, (x, y), F.cross_entropy, dampened)
    for kind, why in {torch.optim.LBFGS: "runs the model again", torch.optim.SparseAdam: "cannot be traced"}.items():
        refused(f"{kind.__name__} {why} .*yourself", model, (x, y), F.cross_entropy, kind(model.parameters()))
    twice = [torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam(model.parameters())]
    refused("two optimizers have parameter", model, (x, y), F.cross_entropy, twice)
    refused("is not in the model", model, (x, y), F.cross_entropy, torch.optim.SGD(net().parameters(), 0.1))


@pytest.mark.parametrize(
    ("match", "options"),
    [
        ("pass the optimizer", {"optimizer": None, "accumulate": 2}),
        ("1 or more", {"accumulate": 0}),
        ("from 0 to below 1", {"average": 1.0}),
        ("the GradScaler is disabled", {"scaler": torch.amp.GradScaler("cpu", enabled=False)}),
        ("no input 'x'", {"dynamic_dims": {"x": {0: "n"}}}),
        ("a size of 1 is taken as fixed", {"dynamic_dims": {"input.0": {0: "n"}}}),
    ],
)
def test_wrong_arguments_are_usage_errors(match, options):
    model, (x, y) = net(), batch()
    given = {"optimizer": torch.optim.SGD(model.parameters(), 0.1)} | options
    refused(match, model, (x[:1], y[:1]), F.cross_entropy, kind=UsageError, **given)
    refused("the batch is a int", model, 3, F.cross_entropy, kind=UsageError)


class Around(nn.Module):
    """A function of what a layer makes, inside a module of its own."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.inner = nn.Linear(4, 4), Applied(function)

    def forward(self, x):
        return self.inner(self.layer(x)).mean()


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


AT = r" in module 'inner' at \S+test_pytorch.py:\d+ `.*`: "


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda x: x * x.sum().item(), rf"reads the value of a tensor \(aten._local_scalar_dense.default\){AT}.*where"),
        (lambda x: x if x.mean() > 0 else -x, rf"reads the value of a tensor \(aten._local_\S+\){AT}.*torch.where"),
        (lambda x: x * x.tolist()[0][0], f"reads the value of a tensor{AT}.*torch.where"),
        (lambda x: x * float(x.detach().numpy().mean()), f"reads the value of a tensor{AT}.*torch.where"),
        (lambda x: x[x > 0], f"aten.nonzero.default makes depends on data{AT}.*mask.sum"),
        (lambda x: x[x.sum(1).nonzero()[:, 0]], f"aten.nonzero.default makes depends on data{AT}.*mask.sum"),
        (lambda x: torch.masked_select(x, x > 0), f"aten.masked_select.default makes depends on data{AT}.*mask.sum"),
        (lambda x: x * torch.unique(x.argmax(1)).numel(), f"aten._unique2.default makes depends on data{AT}.*batch"),
        (lambda x: torch.repeat_interleave(x, x.argmax(1), 0), f"repeat_interleave.Tensor makes.*{AT}.*output_size"),
        (lambda x: torch.linalg.inv(x + torch.eye(4)), rf"\(inv, solve, cholesky\) is in the step{AT}.*outside"),
        (lambda x: torch.linalg.svdvals(x), rf"the step has aten._linalg_svd.default{AT}.*outside"),
        (lambda x: torch.fft.rfft(x).abs(), f"aten._fft_r2c.default{AT[:-2]} makes complex numbers.*imaginary"),
        (lambda x: torch.polar(x, x).real, f"aten.polar.default{AT[:-2]} makes complex numbers.*imaginary"),
        (lambda x: torch.nn.utils.rnn.pack_padded_sequence(x, [4, 2, 1, 1], True).data, f"depends on data{AT}run the"),
    ],
)
def test_what_cannot_be_in_a_graph_is_named_with_its_module_its_line_and_a_way_out(function, match):
    refused(match, Around(function), (torch.randn(4, 4),))


def test_a_wrong_rule_is_caught(monkeypatch):
    from onnx_remat.converters.pytorch.rules import decompositions

    aten = torch.ops.aten
    monkeypatch.setitem(decompositions(), aten.tanh_backward.default, lambda g, y: g * (1 - y))
    refused("the converted step is wrong: grad", nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
            (torch.randn(4, 4), torch.zeros(4, 4)), F.mse_loss)  # fmt: skip


@pytest.mark.slow
def test_add_backward_is_compared_with_torch_in_float32():
    known = checked(forward_models.exported(lambda: Case(net(), batch()))())
    assert float(known["in_float64"]) < 1e-6
    assert float(known["error"]) < 1e-5
    assert float(known["exact_error"]) < 1e-5


def test_what_rounding_decides_torch_decides_alike():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3))
    x, target = torch.randn(64, 4), torch.randint(0, 3, (64,))

    def gradients(decided=None):
        return forward_models._gradients(Case(model, ()), [x], target, torch.float64, decided)

    with torch.no_grad():
        model[0].bias[0] += 1e-5 - model[0](x)[0, 0]  # an entry by a hair above zero
        with Recorder() as recorder:
            model(x)
    (read,) = (value.numpy() for value in recorder.seen)
    other = read.copy()
    other[0, 0] *= -1
    own, alike, flipped = gradients(), gradients([read]), gradients([other])
    apart = {name: check.relative_error(alike[name], own[name]) for name in own}
    moved = {name: check.relative_error(flipped[name], own[name]) for name in own}
    assert max(apart.values()) < 1e-6
    assert moved["loss"] < 1e-4 < 1e-3 < moved["grad.0.weight"]  # one decision of 4096
    with pytest.raises(ConversionError, match="reads differs from torch's"):
        gradients([read + 0.01])
    with pytest.raises(ConversionError, match="more often than the converted step"):
        gradients([])
    with pytest.raises(ConversionError, match="less often than the step"):
        gradients([read, read])


class Late:
    """An object in a cycle, whose finalizer computes."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        torch.zeros(2).add_(1)


class Busy(nn.Module):
    """Leaves such objects, and allocates enough for Python to collect them now and then."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        Late()
        kept = [[] for _ in range(613)]
        return self.inner(x) * (len(kept) / 613)


def test_finalizers_of_other_objects_are_no_part_of_a_step():
    assert export_training_step(Busy(), (torch.randn(3, 4), torch.randn(3, 4)), F.mse_loss)
