"""Jobs as records: the ledger, the spec and its wire form, code bundles, offline profiles."""
