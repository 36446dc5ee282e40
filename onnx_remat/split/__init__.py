"""Split a training step in two: a step that outputs the gradients, and the optimizer's update.

The two meet at a *cut*: one value per parameter, of the parameter's type and shape, such that the update depends on the
batch only through these values. It is a minimum cut of the graph, the nearest to the forward pass, so that all ops on
gradients (clipping, weight decay) belong to the update::

    batch --> forward --> backward --> | grad.w | --> clip, momentum, ... --> new.w
                                       | grad.b |     learning rate, state -> new.b

Run one after the other, both parts are bit-identical to the step. In between, gradients can be summed over batches and
averaged over processes, see `onnx_remat.distributed`.
"""

from onnx_remat.split.accumulate import accumulating
from onnx_remat.split.parts import Split, split_step

__all__ = ["Split", "accumulating", "split_step"]
