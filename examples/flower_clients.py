"""Train one network on two Flower clients by federated averaging, each with a step that keeps a budget.

The server exports the step, rewrites it, and sends it. A client trains it with `Loop`: weights come and go as arrays
under the step's own names. `main` hands the messages over in this process, since Flower's simulation needs Ray, and a
SuperLink a packaged app; both run `client` and `server` as they are. Needs onnx-remat[torch] and flwr 1.38 or newer.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity
from onnx_remat.converters.pytorch import export_training_step
from torch import nn

import onnx_remat
from onnx_remat.training import Loop

BATCH, SIDE, WIDTH, ROUNDS, RATE, MOMENTUM = 128, 24, 16, 6, 0.1, 0.9
SHARES = {0: (8, [0.35, 0.35, 0.15, 0.15]), 1: (4, [0.15, 0.15, 0.35, 0.35])}  # a client's batches, and their classes
client = ClientApp()
server = ServerApp()
opened = cache(lambda step, partition: onnx_remat.Session(step, donate=True))  # at a client's first message


def batches(number: int, classes: list[float], seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Stripes with noise; the class is how narrow they are."""
    rng = np.random.default_rng(seed)
    for _ in range(number):
        kind = rng.choice(4, BATCH, p=classes)
        stripes = np.sin(np.linspace(0, 4 * np.pi, SIDE) * (kind[:, None] + 1))[:, None, None]
        image = stripes + 0.5 * rng.standard_normal((BATCH, 1, SIDE, SIDE))
        yield {"input.0": image.astype(np.float32), "input.1": kind}


@client.train()
def train(message: Message, context: Context) -> Message:
    """Train on the client's own share; momentum starts from zero in every round, and stays with the client."""
    partition = context.node_config["partition-id"]
    session = opened(message.content["config"]["step"], partition)
    weights = {name: array.numpy() for name, array in message.content["arrays"].items()}
    loop = Loop(session, {each.name: np.zeros(each.shape, each.dtype_name) for each in session.inputs} | weights)
    losses = [loop.step(batch) for batch in batches(*SHARES[partition], seed=partition)]
    trained = ArrayRecord({name: Array(loop.view(name)) for name in weights})
    metrics = MetricRecord({"loss": float(np.mean(losses)), "num-examples": BATCH * len(losses)})
    return Message(RecordDict({"arrays": trained, "metrics": metrics}), reply_to=message)


def network() -> nn.Module:
    """Three convolutions, with GroupNorm: it has no running statistics, which clients could not share."""
    layers: list[nn.Module] = []
    for into in (1, WIDTH, WIDTH):
        layers += nn.Conv2d(into, WIDTH, 3, padding=1), nn.GroupNorm(4, WIDTH), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 4))


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """Make the step, and average weights; the global loss is that of images which no client has."""
    torch.manual_seed(0)
    image, kind = map(torch.from_numpy, next(batches(1, [0.25] * 4, seed=2)).values())
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
    step = export_training_step(model, (image, kind), nn.functional.cross_entropy, optimizer)
    result = onnx_remat.rewrite_model(step, budget="75%", effort=3)
    print(f"a client's {result.report.verdict()}")

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(model(image), kind))
        print(f"round {number}: global loss {loss:.4f}")
        return MetricRecord({"loss": loss})

    first, config = ArrayRecord(model.state_dict()), ConfigRecord({"step": result.model.SerializeToString()})
    FedAvg(fraction_evaluate=0.0).start(grid, first, ROUNDS, train_config=config, evaluate_fn=evaluate)
    torch.save(model.state_dict(), "global.pt")


def main() -> None:
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 2  # a SuperLink assigns these
    contexts = [Context(1, node, {"partition-id": node}, RecordDict(), {}) for node in range(3)]  # the server's is last
    here = SimpleNamespace(
        get_node_ids=lambda: list(SHARES),
        send_and_receive=lambda messages, **_: [client(m, contexts[m.metadata.dst_node_id]) for m in messages],
    )
    server(here, contexts[2])


if __name__ == "__main__":
    main()
