"""Programs that tests run under torchrun."""
