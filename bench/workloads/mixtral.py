"""Mixtral's kind: eight experts a layer, two for each token; training."""

from __future__ import annotations

from typing import ClassVar

from bench.workloads.language import LanguageTraining, Learning
from bench.workloads.transformer import Decoding

SMALL = Decoding(32_000, 768, 6, 12, 4, 2048, positions=16_384, experts=8)
TINY = Decoding(61, 16, 2, 2, 1, 32, positions=256, experts=4)


class Training(LanguageTraining):
    SIZES: ClassVar = {
        "full": Learning(SMALL, 12_288, (4, 6, 8, 12)),
        "tiny": Learning(TINY, 64, (1, 2, 3)),
    }
