"""A residual convolutional network with batch normalisation, in the manner of the CIFAR ResNets."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_graphsurgeon as gs

import sample_models.layers  # noqa: F401  (registers the layers)
from sample_models.step import TrainingGraph


def block(graph: TrainingGraph, x: gs.Variable, channels: int, stride: int) -> gs.Variable:
    """Two normalised convolutions around a shortcut, which is projected where the shape changes."""
    y = graph.relu(graph.batch_norm(graph.conv2d(x, "conv.0", channels, stride=stride), "norm.0"))
    y = graph.batch_norm(graph.conv2d(y, "conv.1", channels), "norm.1")
    if x.shape != y.shape:
        x = graph.batch_norm(graph.conv2d(x, "short", channels, kernel=1, stride=stride), "norm.short")
    return graph.relu(graph.residual(x, y))


def build(
    stages: Sequence[int] = (16, 32), blocks: int = 3, batch: int = 32, size: int = 32, classes: int = 10
) -> onnx.ModelProto:
    """A stem, `blocks` residual blocks per stage, pooling, a head; each stage halves the size of the last."""
    graph = TrainingGraph("residual_cnn")
    x = graph.batch_input(0, (batch, 3, size, size))
    labels = graph.batch_input(1, (batch,), below=classes)
    with graph.scope("stem"):
        x = graph.relu(graph.batch_norm(graph.conv2d(x, "conv", stages[0]), "norm"))
    for stage, channels in enumerate(stages):
        for index in range(blocks):
            with graph.scope(f"stage.{stage}.{index}"):
                x = block(graph, x, channels, stride=2 if stage and not index else 1)
    logits = graph.linear(graph.global_average_pool(x), "head", classes)
    return graph.finish(graph.cross_entropy(logits, labels), learning_rate=0.1)
