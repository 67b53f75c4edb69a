"""Finds a plan by local search and large neighborhood search.

What a plan costs is decided in `cost`. The search needs an additive cost model.

`docs/notes/search.md` explains the search with an example. If the docstring of a constant names a
study, it is a row or a paragraph of "What each part is worth" there; other constants bound the time
or the rounding of a part, and were not varied. Glossary of the code:

- **unit**: one table, or several tables that constraints keep together.
- **step**: the number of columns in which widths are counted, 4 for all but very wide tables.
- **width**: the number of steps of a column piece.
- **shape**: a unit at one width. Shapes are numbered over all units; their costs are computed once.
- **piece**: a shape on a rank, that is, a column shard in the making.
- **slot**: the place of a piece in the arrays of a state.
- **row blocks**: a unit cut by rows into one block for each rank of a group.
- **group**: ranks that hold row blocks together: all ranks, or the ranks of one host.
- **kind**: the groups of one size, with the row blocks of all units for that size.
- **layout** of a unit: `COLUMNS`, or the group that holds its row blocks.
- **demand**: the vector that a piece adds to its rank; demands of several pieces add up.
- **load**: one of the times of a rank whose maxima over ranks make up the objective.
- **processing time**: the part of the loads that a rank causes by its own pieces alone.
- **crowding**: by how much the loads of a piece and the others on its rank are larger together than
  apart, because the widest of them slows down all; not part of the loads of a single piece.
- **margin**: the part of a load that allows for the cost model's error on pieces of tables.
- **shared time**: time that every rank pays, wherever the pieces are.
- **objective**: the maxima of the loads over ranks and the shared time, added up.
- **smooth objective**: the objective with norms instead of maxima.
- **cut**: the division of a unit into pieces or row blocks, before they are placed.
- **edit**: the smallest change of a state: a width on a rank, or the layout of a unit.
- **move**: a few edits that keep every unit complete.
- **neighborhood**: the states that one move leads to.
- **descent**: moves that improve the smooth objective, until there are none.
- **start**: a first plan after a descent.
- **walk**: a descent, then rebuilds, each with a short descent, until they stop helping.
- **rebuild**: pieces of a few ranks are taken away and placed anew (large neighborhood search).
- **budget**: limits on how much a plan may differ from an earlier one.
"""
