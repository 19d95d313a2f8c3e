// The workspace: what a person chose in a project, kept by itself, and the way back from each choice. A gateway keeps it for each
// user; elsewhere the browser does. A link shows what it says, and leaves the workspace alone until it is told otherwise.
import { untrack } from 'svelte';
import { get, post, session } from './api';
import { DEFAULTS, place, read, view, write, type View } from './view.svelte';

const SOON = 800, PAUSE = 600, STEPS = 100; // ms until it is saved; ms between two steps back; steps back
const HERE = ['project', 'page', 'run']; // where one is: Back goes back there
const PASSING = new Set([...HERE, 'zoom', 'zoomAxis', 'step', 'search', 'opSearch', 'lineSearch', 'tableSearch', 'full']); // not kept

function without(names: Iterable<string>): string {
  const left: Record<string, unknown> = { ...view };
  for (const name of names) left[name] = DEFAULTS[name as keyof View] ?? null;
  return write(left as unknown as View);
}
const chosen = () => without(PASSING);
const stepNow = () => without(HERE);

class Workspace {
  past = $state.raw<string[]>([]);
  future = $state.raw<string[]>([]);
  linked = $state(false); // what is seen came with a link: it is not kept
  error = $state('');
  #project = '';
  #now = '';
  #at = -Infinity;
  #saved = '';
  #timer: ReturnType<typeof setTimeout> | undefined;

  /** Begin: a bare address opens what was kept; one that says more is shown as it says. */
  start(): () => void {
    this.#saved = kept(view.project);
    this.#arrived();
    const stop = $effect.root(() => {
      $effect(() => { const now = stepNow(), project = view.project; untrack(() => this.#note(project, now)); });
    });
    const leave = () => this.#save();
    const moved = () => { // after the view has followed; an address that was typed has no state
      const { state } = history;
      setTimeout(() => (state ? this.#mark(state.linked === true) : this.#arrived(false)));
    };
    addEventListener('pagehide', leave);
    addEventListener('popstate', moved);
    return () => { stop(); removeEventListener('pagehide', leave); removeEventListener('popstate', moved); };
  }

  /** Ask the gateway, where there is one, once it is known who asks. */
  async fetch(): Promise<void> {
    const project = view.project;
    if (!session.user || !project) return;
    const before = stepNow();
    try {
      const { fragment } = await get<{ fragment: string }>('api/workspace', { project });
      if (project !== view.project) return;
      this.#saved = fragment;
      if (before === stepNow()) this.#arrived();
    } catch (why) { this.error = (why as Error).message; }
  }

  /** Open another project as it was left. */
  enter(project: string): void {
    this.#save();
    this.#saved = kept(project);
    const page = ['charts', 'table', 'alerts'].includes(view.page) ? view.page : 'charts';
    Object.assign(view, read(this.#saved), { project, page });
    this.#mark(false);
    void this.fetch();
  }

  #arrived(reloaded = history.state?.linked === false): void {
    const given = chosen(), says = !!given || !!view.full; // a chart that fills the screen may not be there in another view
    if (!says && this.#saved) { // what an address says in passing, such as a zoom, is shown with it
      const passing = Object.fromEntries([...PASSING].map((name) => [name, view[name as keyof View]]));
      this.#apply(this.#saved);
      Object.assign(view, passing);
    }
    this.#mark(says && !!this.#saved && given !== this.#saved && !reloaded);
  }
  #mark(linked: boolean): void { this.linked = place.linked = linked; }

  #note(project: string, now: string): void {
    if (project !== this.#project) {
      if (!this.#project) { this.#saved = kept(project); this.#arrived(); } // the address named no project
      [this.#project, this.#now, this.past, this.future] = [project, stepNow(), [], []];
      return;
    }
    if (now === this.#now) return;
    const time = performance.now();
    if (time - this.#at > PAUSE || !this.past.length) this.past = [...this.past.slice(1 - STEPS), this.#now];
    [this.#now, this.#at, this.future] = [now, time, []];
    this.#soon();
  }
  #soon() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#save(), SOON);
  }

  undo(): void { const to = this.past.at(-1); if (to !== undefined) { this.future = [...this.future, this.#now]; this.past = this.past.slice(0, -1); this.#back(to); } }
  redo(): void { const to = this.future.at(-1); if (to !== undefined) { this.past = [...this.past, this.#now]; this.future = this.future.slice(0, -1); this.#back(to); } }
  #back(to: string) {
    this.#apply(to);
    this.#now = stepNow();
    this.#at = -Infinity;
    this.#soon();
  }
  /** Show what a fragment says, where one is now. */
  #apply(fragment: string) { Object.assign(view, read(fragment), { project: view.project, page: view.page, run: view.run }); }

  show(fragment: string): void { Object.assign(view, read(fragment), { project: view.project }); }
  reset(): void { this.#apply(''); this.#mark(false); }
  /** Of a link: make it the workspace, or go back to the workspace. */
  adopt(): void { this.#mark(false); this.#save(); }
  leave(): void { this.#mark(false); this.#apply(this.#saved); }

  #save(): void {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    const now = chosen(), project = view.project;
    if (this.linked || !project || project !== this.#project || now === this.#saved) return;
    this.#saved = now;
    if (!session.user) { keep(project, now); return; }
    post('api/keep', { project, fragment: now }, true).then(() => (this.error = ''), (why: Error) => { this.error = why.message; this.#saved = ''; });
  }
}

// A browser keeps it for each address of a dashboard; in frames of other sites it may keep nothing.
const name = (project: string) => `workspace ${location.pathname} ${project}`;
function kept(project: string): string {
  try { return localStorage.getItem(name(project)) ?? ''; } catch { return ''; }
}
function keep(project: string, fragment: string): void {
  try {
    if (fragment) localStorage.setItem(name(project), fragment);
    else localStorage.removeItem(name(project));
  } catch { return; } // it lasts as long as the page
}

export const workspace = new Workspace();
