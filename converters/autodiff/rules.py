"""All gradient rules: importing this module registers them."""

from . import loss, rules_conv, rules_elementwise, rules_linear, rules_move, rules_norm, rules_pool, rules_reduce
from .registry import RULES

__all__ = [
    "RULES", "loss", "rules_conv", "rules_elementwise", "rules_linear", "rules_move", "rules_norm", "rules_pool",
    "rules_reduce",
]  # fmt: skip
