import { mount } from 'svelte';
import App from './App.svelte';
import './app.css';
import { model } from './lib/model.svelte';

void model.start(); // asked before the page is made, so that the answer is there when it is
mount(App, { target: document.body });
if (parent !== window) parent.postMessage('fanfold', '*'); // a notebook shows its frame once there is something in it
