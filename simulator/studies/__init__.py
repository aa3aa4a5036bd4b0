"""Studies: questions made of many predictions. Search, placement, comparison, sensitivity, goodput, serving, replay, backtest."""
