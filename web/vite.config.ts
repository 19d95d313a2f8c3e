// Plain file names: the built page is committed, so a rebuild shows as a change of the same files, and the server's
// entity tags keep browsers up to date. All addresses are relative: the page works under any path of a proxy.
import { svelte } from '@sveltejs/vite-plugin-svelte';
import { defineConfig } from 'vitest/config';

export default defineConfig({
  plugins: [svelte()],
  test: { include: ['test/**/*.test.ts'] },
  base: './',
  build: {
    target: 'es2022',
    outDir: '../src/fanfold/server/static',
    emptyOutDir: true,
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    rollupOptions: {
      output: {
        // What the first page needs is one file: two of half the size pack worse.
        codeSplitting: { groups: [{ name: 'core', test: /node_modules|src\/(App|Chart|Controls|Loading|Outage|RunList|Status|Top|Views|pages\/Charts)\.svelte|src\/lib\/(api|chart|colours|copy|dismiss|flow|format|keys|layout|lazy|live|model|points|queue|refused|scale|shown|theme|view|wire|workspace)\b/ }] },
        entryFileNames: '[name].js', chunkFileNames: '[name].js', assetFileNames: '[name][extname]' },
    },
  },
  worker: { format: 'es', rollupOptions: { output: { entryFileNames: '[name].js' } } },
});
