"""linattn lab early-exit: train, sweep, report, predict."""
