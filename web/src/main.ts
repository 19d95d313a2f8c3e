import { mount } from 'svelte';
import App from './App.svelte';
import './app.css';
import { model } from './lib/model.svelte';
import { workspace } from './lib/workspace.svelte';

const embedded = /\/embed(\.html)?$/.test(location.pathname); // one chart, in a page of somebody else
void model.start().then(() => (embedded ? undefined : workspace.fetch())); // asked before the page is made, so that the answer is there when it is
if (embedded) void import('./Embed.svelte').then(({ default: Embed }) => mount(Embed, { target: document.body }));
else mount(App, { target: document.body });
if (parent !== window) parent.postMessage('fanfold', '*'); // a notebook shows its frame once there is something in it
