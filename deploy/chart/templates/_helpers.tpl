{{/* Names, labels and the pieces that several pods share. */}}
{{- define "fanfold.name" -}}
{{- if contains .Chart.Name .Release.Name -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{- else -}}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{- end -}}
{{- end -}}

{{/* (dict "root" $ "part" "gateway") */}}
{{- define "fanfold.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "fanfold.labels" -}}
{{ include "fanfold.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "fanfold.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "fanfold.scheme" -}}
{{ if .Values.gateway.tls.secretName }}https{{ else }}http{{ end }}
{{- end -}}

{{- define "fanfold.publicUrl" -}}
{{- if .Values.gateway.publicUrl -}}{{ .Values.gateway.publicUrl }}{{- else if .Values.gateway.ingress.enabled -}}https://{{ .Values.gateway.ingress.host }}{{- end -}}
{{- end -}}

{{/* How people get to the dashboard. */}}
{{- define "fanfold.loginArgs" -}}
{{- $l := .Values.gateway.login -}}
{{- with include "fanfold.publicUrl" . }}
- --public-url={{ . }}
{{- end }}
{{- range $l.grants }}
- {{ printf "--grant=%s" . | quote }}
{{- end }}
{{- if $l.oidc.issuer }}
{{- $_ := required "gateway.publicUrl is not set. Nothing was installed: the provider has to send people back somewhere. Set it, or gateway.ingress." (include "fanfold.publicUrl" .) }}
- --oidc-issuer={{ $l.oidc.issuer }}
- {{ printf "--oidc-client=%s" $l.oidc.client | quote }}
{{- end }}
{{- range $l.proxy.networks }}
- --trusted-proxy={{ . }}
{{- end }}
{{- with $l.proxy.header }}
- --trust-header={{ . }}
{{- end }}
{{- with $l.proxy.groups }}
- --trust-groups={{ . }}
{{- end }}
{{- end -}}

{{- define "fanfold.clickhouseHost" -}}
{{- if .Values.clickhouse.enabled -}}{{ include "fanfold.name" . }}-clickhouse{{- else -}}{{ required "clickhouse.host is not set. Nothing was installed. Name your server, or set clickhouse.enabled." .Values.clickhouse.host }}{{- end -}}
{{- end -}}

{{- define "fanfold.clickhousePort" -}}
{{ if .Values.clickhouse.enabled }}8123{{ else }}{{ .Values.clickhouse.port }}{{ end }}
{{- end -}}

{{/* The store's address, without its password: that comes from a Secret. */}}
{{- define "fanfold.store" -}}
{{- $c := .Values.clickhouse -}}
{{- $options := list -}}
{{- if $c.cluster }}{{ $options = append $options (printf "cluster=%s" $c.cluster) }}{{ end -}}
{{- if $c.replicated }}{{ $options = append $options "replicated=1" }}{{ end -}}
{{- if $c.days }}{{ $options = append $options (printf "ttl_days=%d" (int $c.days)) }}{{ end -}}
{{- if $c.ca.secretName }}{{ $options = append $options (printf "ca=/clickhouse-ca/%s" $c.ca.key) }}{{ end -}}
clickhouse{{ if $c.tls }}s{{ end }}://{{ $c.user }}@{{ include "fanfold.clickhouseHost" . }}:{{ include "fanfold.clickhousePort" . }}/{{ $c.database }}
{{- if $options }}?{{ join "&" $options }}{{ end -}}
{{- end -}}

{{- define "fanfold.clickhouseSecret" -}}
{{- if .Values.clickhouse.existingSecret -}}{{ .Values.clickhouse.existingSecret }}
{{- else if .Values.clickhouse.enabled -}}{{ include "fanfold.name" . }}-clickhouse
{{- else -}}{{ fail "clickhouse.existingSecret is not set. Nothing was installed: tables are made before anything else, so the password has to be there first. Make a Secret and name it." }}
{{- end -}}
{{- end -}}

{{- define "fanfold.storeEnv" -}}
- name: FANFOLD_CLICKHOUSE_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "fanfold.clickhouseSecret" . }}, key: {{ .Values.clickhouse.key }}}}
{{- end -}}

{{- define "fanfold.storeMounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .Values.clickhouse.ca.secretName }}
- {name: clickhouse-ca, mountPath: /clickhouse-ca, readOnly: true}
{{- end }}
{{- end -}}

{{- define "fanfold.storeVolumes" -}}
- name: tmp
  emptyDir: {sizeLimit: 2Gi}
{{- with .Values.clickhouse.ca.secretName }}
- name: clickhouse-ca
  secret: {secretName: {{ . }}}
{{- end }}
{{- end -}}

{{- define "fanfold.forwarderSecret" -}}
{{ .Values.forwarder.token.existingSecret | default (printf "%s-forwarder" (include "fanfold.name" .)) }}
{{- end -}}

{{- define "fanfold.sessionSecret" -}}
{{ .Values.gateway.session.existingSecret | default (printf "%s-session" (include "fanfold.name" .)) }}
{{- end -}}

{{/* Keep what an earlier installation made up, else make it up: (dict "root" $ "name" … "key" …) */}}
{{- define "fanfold.kept" -}}
{{- $known := lookup "v1" "Secret" .root.Release.Namespace .name -}}
{{- if and $known (hasKey ($known.data | default dict) .key) -}}{{ index $known.data .key }}{{- else -}}{{ randAlphaNum 40 | b64enc }}{{- end -}}
{{- end -}}

{{- define "fanfold.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "fanfold.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Where a pod may go; the context is a part of the values. */}}
{{- define "fanfold.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Names are looked up before anything else can be reached. */}}
{{- define "fanfold.dns" -}}
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end -}}
