"""Plain nn.Modules; nothing here imports torch.distributed."""
