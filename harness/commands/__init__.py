"""The commands of the `pagedbench` door, one page each; loaded when called, so that listing stays light."""
