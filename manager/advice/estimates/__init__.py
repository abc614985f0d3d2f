"""What a recipe that was never measured will cost, from similar ones that were (SchedMate §3.1).

similar.py     the most similar recipes: facts and sources in one SQLite file, their vectors and cosines
estimator.py   their measurements, scaled and blended: `Estimator.estimate`
"""
