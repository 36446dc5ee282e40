"""A training step cut in two: one that ends at the gradients, and the optimizer's update.

Between the two lies a *cut*: one value per parameter, of the parameter's type and shape, through which all that the
update learns of the batch must pass. It is a minimum cut of the graph, the one nearest to the forward pass, so that
whatever is done to gradients (clipping, weight decay) is the update's::

    batch --> forward --> backward --> | grad.w | --> clip, momentum, ... --> new.w
                                       | grad.b |     learning rate, state -> new.b

Run one after the other, both compute what the step computes, to the last bit. In between, gradients can be summed over
batches and averaged over processes, see `onnx_remat.distributed`.
"""

from onnx_remat.split.accumulate import accumulating
from onnx_remat.split.parts import Split, split_step

__all__ = ["Split", "accumulating", "split_step"]
