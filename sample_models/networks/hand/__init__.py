"""Networks that people write by hand, each of a size that trains in seconds."""

from __future__ import annotations

from . import fields, generative, graphs, images, scans, tables, texts
from .case import NETWORKS, Case

__all__ = ["NETWORKS", "Case", "fields", "generative", "graphs", "images", "scans", "tables", "texts"]
