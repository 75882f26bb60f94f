"""Schedulers and detokenizers: membership, choice of a scheduler, dispatch and recovery."""
