"""Records of what the runtimes of FSDP and of collectives do."""
