"""What a report says of its own figures, so that the file is enough to read it by."""

DEFINITIONS = """
<h2>What the figures mean</h2>
<dl>
<dt>TTFT</dt><dd>from the scheduled time to the first message with tokens</dd>
<dt>from sent</dt><dd>the same from when the request was handed to the transport; the difference is what the generator was late</dd>
<dt>TPOT</dt><dd>(last message − first message) / (tokens − 1), one value for a request of two tokens or more</dd>
<dt>ITL</dt><dd>each gap between two messages of a request, whatever number of tokens the later one has; tokens per message stand beside it</dd>
<dt>E2E</dt><dd>from the scheduled time to the end of the answer</dd>
<dt>goodput</dt><dd>requests that met every limit, by the time from the first request's schedule to the last one's end; a request that was refused, failed,
 ran out of time or came out wrong met none</dd>
<dt>attainment</dt><dd>the same requests, by all requests</dd>
<dt>open loop</dt><dd>the schedule decides when a request is sent: a server that stalls meets the same load</dd>
<dt>closed loop</dt><dd>an answer decides: a server that stalls is spared, so that its latencies say nothing about a load that does not wait</dd>
<dt>VOID</dt><dd>the generator could not keep its schedule or was too busy to measure; the figures are shown and say nothing</dd>
</dl>
""".strip()
