// One event stream for all tabs: browsers allow six connections per server, and a stream occupies one permanently.
// Only visible tabs are notified; while there are none, the stream is closed and the server gets no requests.
import { listen, type Message } from './live';

const watching = new Set<MessagePort>();
let close: (() => void) | null = null;
let state: Message | null = null; // sent to tabs that join later

function tell(message: Message) {
  if (message.kind !== 'changed') state = message;
  for (const port of watching) port.postMessage(message);
}

function arrange() {
  if (watching.size && !close) close = listen(tell);
  else if (!watching.size && close) { close(); close = null; }
}

(self as unknown as { onconnect: (event: MessageEvent) => void }).onconnect = (event) => {
  const port = event.ports[0];
  port.onmessage = ({ data }) => {
    if (data === 'watch') { watching.add(port); if (close && state) port.postMessage(state); } else watching.delete(port);
    arrange();
  };
};
