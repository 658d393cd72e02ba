"""Tensors and layouts, the wire frame, LoRA algebra and named random streams: numpy and the standard library only."""
