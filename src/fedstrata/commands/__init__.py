"""The commands, one module per panel of the help page; each registers itself on `fedstrata.commands.app.app`."""
