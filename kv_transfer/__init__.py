"""Moving the bytes of KV blocks from ranks that have them to ranks that need them. No torch, no policy.

- `store`: the paged pool as rows that can be read and written; a rank server adapts its own pool to it.
- `generations`: which blocks were handed out again since; `leases`: which blocks may still be read, and until when.
- `facts`: the handshake. `framing`: one message as bytes. `shared_memory`: a pool that ranks of the same host copy from.
- `source` and `service`: the side that is read. `puller`: the side that reads and writes.

Where it plugs in. Nothing here decides who moves what: a coordinator grants a session on every source rank (`LeaseTable.grant`,
with the request's blocks on that rank and the target ranks that will read them, as `cp_layout.reshard` names them), lets it
grow while a prefill goes on (`extend`), and tells every target rank to `Puller.pull` a range into blocks that it has reserved
there. The source reports `LeaseTable.take_ended` before the coordinator frees; the target's report or `TransferFailed`
says whether to commit, to recompute or to fail. A rank server
  - adapts its pool with a `Store`,
  - stamps `Generations` with the new block ids of each plan before it runs it,
  - adds `KvTransferServicer` to its server by `service.add_to_server`, and runs `leases.sweep` for as long as it lives.
"""
