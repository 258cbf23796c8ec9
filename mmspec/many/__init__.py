"""Many machines: prompts decoded by a pool of workers through Ray Data, into a folder that can be resumed."""
