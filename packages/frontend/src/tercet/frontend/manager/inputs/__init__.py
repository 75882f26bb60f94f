"""Inputs of requests before they are dispatched: checks, grammars, predictions and images."""
