"""`lit-asyncrl plan`: predicts the staleness of a configured run before it is started."""
