"""How clients are executed. `local`: in this process, one after the other; the reference."""
