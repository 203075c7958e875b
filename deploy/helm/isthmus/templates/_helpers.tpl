{{- define "isthmus.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "isthmus.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (include "isthmus.name" .) .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "isthmus.name" .) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "isthmus.selector" -}}
app.kubernetes.io/name: {{ include "isthmus.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "isthmus.labels" -}}
{{ include "isthmus.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "isthmus.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "isthmus.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "isthmus.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- /* "true" with TLS. */ -}}
{{- define "isthmus.tls" -}}
{{- if or .Values.tls.enabled .Values.tls.generate -}}true{{- end -}}
{{- end -}}

{{- /* "true" if administration is reached from outside the pod: if something says by whom. */ -}}
{{- define "isthmus.adminOpen" -}}
{{- if or .Values.access.admin .Values.tls.generate -}}true{{- end -}}
{{- end -}}

{{- define "isthmus.tlsSecret" -}}
{{- if .Values.tls.generate -}}{{- include "isthmus.fullname" . }}-tls{{- else -}}{{- .Values.tls.secretName -}}{{- end -}}
{{- end -}}

{{- /* Those of config.consumers.kubernetes that write to the pod's own cluster, as JSON; "" for none. */ -}}
{{- define "isthmus.consumers" -}}
{{- $own := list -}}
{{- range (((.Values.config).consumers).kubernetes) -}}
{{- if not .kubeconfig -}}{{- $own = append $own . -}}{{- end -}}
{{- end -}}
{{- if $own -}}{{- toJson $own -}}{{- end -}}
{{- end -}}

{{- define "isthmus.listener" -}}
{{- $l := dict "address" (printf ":%d" (int .port)) -}}
{{- if include "isthmus.tls" .root -}}
{{- $tls := dict "cert_file" "/etc/isthmus-tls/tls.crt" "key_file" "/etc/isthmus-tls/tls.key" -}}
{{- if and .root.Values.tls.clientAuth .sinks -}}{{- $_ := set $tls "client_ca_file" "/etc/isthmus-tls/ca.crt" -}}{{- end -}}
{{- $_ := set $l "tls" $tls -}}
{{- end -}}
{{- if .allow -}}{{- $_ := set $l "allow" .allow -}}{{- end -}}
{{- if not (or (include "isthmus.tls" .root) .allow) -}}{{- $_ := set $l "insecure" true -}}{{- end -}}
{{- toJson $l -}}
{{- end -}}

{{- define "isthmus.config" -}}
listen:
  xds: {{ include "isthmus.listener" (dict "root" . "port" 15051 "allow" .Values.access.xds "sinks" true) }}
  {{- if include "isthmus.adminOpen" . }}
  {{- $allow := .Values.access.admin }}
  {{- if .Values.tls.generate }}{{ $allow = append $allow (dict "peer" (dict "token_file" "/etc/isthmus-tls/token") "role" "operate") }}{{ end }}
  admin: {{ include "isthmus.listener" (dict "root" . "port" 15080 "allow" $allow "sinks" false) }}
  {{- else }}
  admin: 127.0.0.1:15080
  {{- end }}
{{ toYaml .Values.config }}
{{- end -}}

{{- /* The pods of a workload: root, and shard, the number of one or "" for all in one. */ -}}
{{- define "isthmus.pod" -}}
{{- $v := .root.Values -}}
{{- $shard := "" -}}
{{- if ne (toString .shard) "" -}}{{- $shard = toString .shard -}}{{- end -}}
metadata:
  labels:
    {{- include "isthmus.labels" .root | nindent 4 }}
    {{- if $shard }}
    isthmus.io/shard: {{ $shard | quote }}
    {{- end }}
    {{- with $v.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    sidecar.istio.io/inject: "false"
    {{- if and $v.access.admin (not $v.serviceMonitor.enabled) }}
    prometheus.io/scrape: "true"
    prometheus.io/port: "15080"
    {{- if include "isthmus.tls" .root }}
    prometheus.io/scheme: https
    {{- end }}
    {{- end }}
    {{- with $v.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "isthmus.serviceAccount" .root }}
  automountServiceAccountToken: {{ ternary "true" "false" (ne (include "isthmus.consumers" .root) "") }}
  {{- with $v.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  terminationGracePeriodSeconds: {{ $v.terminationGracePeriodSeconds }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 65532
    runAsGroup: 65532
    fsGroup: 65532
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- if $v.topologySpread.enabled }}
  topologySpreadConstraints:
  - topologyKey: {{ $v.topologySpread.topologyKey }}
    maxSkew: {{ $v.topologySpread.maxSkew }}
    whenUnsatisfiable: {{ $v.topologySpread.whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "isthmus.selector" .root | nindent 8 }}
        {{- if $shard }}
        isthmus.io/shard: {{ $shard | quote }}
        {{- end }}
  {{- end }}
  {{- if eq $v.mode "sidecar" }}
  initContainers:
  # It goes on beside the bridge, and ends after it.
  - {{- merge (dict "restartPolicy" "Always") $v.agent.container | toYaml | nindent 4 }}
  {{- end }}
  containers:
  - name: isthmus
    image: {{ include "isthmus.image" .root }}
    imagePullPolicy: {{ $v.image.pullPolicy }}
    args:
    - serve
    - --config
    - /etc/isthmus/isthmus.yaml
    {{- if $shard }}
    - --shards
    - {{ printf "%s/%d" $shard (int $v.shards.count) | quote }}
    {{- end }}
    env:
    - {name: STATE_DIRECTORY, value: /var/lib/isthmus}
    {{- with $v.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with $v.envFrom }}
    envFrom: {{- toYaml . | nindent 4 }}
    {{- end }}
    ports:
    - {name: grpc-xds, containerPort: 15051}
    {{- if include "isthmus.adminOpen" .root }}
    - {name: http-admin, containerPort: 15080}
    # Not ready means that the first listing is not in; a rolling update waits for it.
    readinessProbe:
      httpGet: {path: /readyz, port: http-admin, scheme: {{ ternary "HTTPS" "HTTP" (eq (include "isthmus.tls" .root) "true") }}}
      periodSeconds: 2
    livenessProbe:
      httpGet: {path: /healthz, port: http-admin, scheme: {{ ternary "HTTPS" "HTTP" (eq (include "isthmus.tls" .root) "true") }}}
    {{- else }}
    readinessProbe:
      exec: {command: [/isthmus, healthcheck, --ready]}
      periodSeconds: 2
      timeoutSeconds: 5
    livenessProbe:
      exec: {command: [/isthmus, healthcheck]}
      timeoutSeconds: 5
    {{- end }}
    resources: {{- toYaml $v.resources | nindent 6 }}
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: {drop: [ALL]}
    volumeMounts:
    - {name: config, mountPath: /etc/isthmus, readOnly: true}
    - {name: tmp, mountPath: /tmp}
    - {name: state, mountPath: /var/lib/isthmus}
    {{- if include "isthmus.tls" .root }}
    - {name: tls, mountPath: /etc/isthmus-tls, readOnly: true}
    {{- end }}
    {{- with $v.volumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
  - name: config
    configMap: {name: {{ include "isthmus.fullname" .root }}}
  # The sockets between the bridge and its plugins.
  - name: tmp
    emptyDir: {medium: Memory, sizeLimit: 16Mi}
  {{- if not $v.state.persistence.enabled }}
  - name: state
    emptyDir: {sizeLimit: {{ $v.state.sizeLimit }}}
  {{- end }}
  {{- if include "isthmus.tls" .root }}
  - name: tls
    secret: {secretName: {{ include "isthmus.tlsSecret" .root }}}
  {{- end }}
  {{- with $v.volumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with $v.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
