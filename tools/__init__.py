"""Generators: what is written into docs/ and deployments/monitoring/ from the code, so that nothing is typed twice."""
