"""Policies place tables one by one, and each method is one file.

The sharders that use them are in `sharders`.

Glossary:
    policy     the networks that choose a rank for each table, in descending order of cost
    episode    the placement of all tables of one task
    actor      a policy in the course of a batch of episodes
    pool       the tables that training tasks are drawn from
    round      one iteration of a training: measure plans, fit the cost network, improve the policy
    costs      predictions of the run's cost model, which a policy reads on other hardware
    overflow   a table was placed where it does not fit, because it fits nowhere
"""
