"""What `fedstrata new-method` writes; `{{name}}` and `{{dist}}` are filled in."""
