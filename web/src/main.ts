import { mount } from 'svelte';
import App from './App.svelte';
import './app.css';
import { model } from './lib/model.svelte';
import { view } from './lib/view.svelte';
import { workspace } from './lib/workspace.svelte';

const embedded = /\/embed(\.html)?$/.test(location.pathname); // one chart in an iframe of another page
// Requested before mounting, so that the responses are there early; the workspace first, as it may filter or sort.
if (!embedded) workspace.start();
if (view.project) model.open(view.project);
void model.start().then(() => (embedded ? undefined : workspace.fetch()));
if (embedded) void import('./Embed.svelte').then(({ default: Embed }) => mount(Embed, { target: document.body }));
else mount(App, { target: document.body });
if (parent !== window) parent.postMessage('fanfold', '*'); // a notebook shows its iframe once it has content
