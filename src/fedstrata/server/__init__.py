"""The server's side of a round, step by step; `fedstrata.round` strings the steps together."""
