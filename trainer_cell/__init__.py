"""The torchrun program that trains adapters over one frozen base model."""
