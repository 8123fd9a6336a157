"""Commands of the instruments: options in, one record and one table out."""
