"""Tensors and layouts, the wire frame, LoRA algebra and named random streams: numpy, no torch."""
