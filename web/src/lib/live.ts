// Live updates: change notifications from the server's event stream, through a worker shared by all tabs where available.

export interface Message { kind: 'online' | 'offline' | 'changed'; runs?: [string, string][] | null }

/** Open the event stream. Browsers reconnect when the connection breaks, but not after an error response, such as a proxy's while the
 * server restarts: then we do. */
export function listen(tell: (message: Message) => void): () => void {
  let source: EventSource, again: ReturnType<typeof setTimeout> | undefined, wait = 1000;
  const open = () => {
    source = new EventSource('./api/live');
    source.addEventListener('hello', () => { wait = 1000; tell({ kind: 'online' }); });
    source.addEventListener('changed', (event) => tell({ kind: 'changed', runs: JSON.parse((event as MessageEvent).data).runs }));
    source.onerror = () => {
      tell({ kind: 'offline' });
      if (source.readyState !== EventSource.CLOSED) return;
      again = setTimeout(open, wait);
      wait = Math.min(30_000, wait * 2);
    };
  };
  open();
  return () => { clearTimeout(again); source.close(); };
}

/** Subscribe to notifications while this tab is visible. Returning to it counts as "everything may have changed". */
export function watch(tell: (message: Message) => void): () => void {
  const channel = connect(tell);
  const look = () => {
    channel(document.hidden ? 'rest' : 'watch');
    if (!document.hidden) tell({ kind: 'changed', runs: null });
  };
  channel(document.hidden ? 'rest' : 'watch');
  document.addEventListener('visibilitychange', look);
  const leave = () => channel('rest');
  addEventListener('pagehide', leave);
  return () => {
    leave();
    removeEventListener('pagehide', leave);
    document.removeEventListener('visibilitychange', look);
  };
}

/** Return the shared worker; null if there is none, as in third-party iframes without storage. */
function sharedWorker(): SharedWorker | null {
  try {
    return new SharedWorker(new URL('./live.worker.ts', import.meta.url), { type: 'module', name: 'fanfold live' });
  } catch {
    return null;
  }
}

function connect(tell: (message: Message) => void): (word: 'watch' | 'rest') => void {
  const worker = sharedWorker();
  if (worker) {
    worker.port.onmessage = ({ data }) => tell(data);
    return (word) => worker.port.postMessage(word);
  }
  let close: (() => void) | null = null;
  return (word) => {
    if (word === 'watch' && !close) close = listen(tell);
    else if (word === 'rest' && close) { close(); close = null; }
  };
}
