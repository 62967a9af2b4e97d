# The scripts are the commands; these are shorter names for them. make test ARGS="-k journal"
.PHONY: bootstrap quickstart lint test bench
bootstrap: ; scripts/bootstrap dev digits
quickstart: ; scripts/quickstart
lint: ; bash -c '. scripts/bootstrap dev digits && scripts/lint'
test: ; scripts/test $(ARGS)
bench: ; for name in step resume; do scripts/bench $$name $(ARGS) || exit; done
