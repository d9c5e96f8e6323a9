"""The parts of `benchmarks/critic_vs_group.py`: arms and their controls, runs, measures, comparisons, the report."""
