"""A deep multi-layer perceptron on a large batch: nearly all memory is activations, all of the same size.

The last layer's update stands first in the file, as in a loop over gradients as they arrive. ONNX Runtime
then leaves all weight gradients to the end of the step and holds every activation, and its gradient, until
there: half of the peak is a matter of order.
"""

from __future__ import annotations

import onnx

import sample_models.layers  # noqa: F401  (registers the layers)
from sample_models.step import TrainingGraph


def build(
    depth: int = 24, width: int = 128, batch: int = 8192, features: int = 64, classes: int = 10
) -> onnx.ModelProto:
    """`depth` hidden layers of linear and ReLU, a linear head, cross-entropy, SGD."""
    graph = TrainingGraph("deep_mlp")
    x = graph.batch_input(0, (batch, features))
    labels = graph.batch_input(1, (batch,), below=classes)
    for index in range(depth):
        with graph.scope(f"layer.{index}"):
            x = graph.relu(graph.linear(x, "fc", width))
    loss = graph.cross_entropy(graph.linear(x, "head", classes), labels)
    return graph.finish(loss, learning_rate=0.05, last_first=True)
