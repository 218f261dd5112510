"""The whole product: `cellgate serve`, real torchrun ranks, the real SDK."""
