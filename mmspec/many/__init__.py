"""Distributed decoding of prompts: a pool of Ray Data workers writes into a folder that can be resumed."""
