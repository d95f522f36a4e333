{{- define "tierstore.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "tierstore.labels" -}}
app.kubernetes.io/name: tierstore
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "tierstore.scheme" -}}
{{- if .Values.tls.secret }}https{{ else }}http{{ end -}}
{{- end }}

{{- /* What does not go together. */}}
{{- define "tierstore.check" -}}
{{- $v := .Values -}}
{{- if and (not $v.tokens.secret) (not $v.tokens.open) }}{{ fail "tokens.secret: expected the name of a Secret with tokens.json, or tokens.open=true where whoever reaches a port may change models" }}{{ end -}}
{{- if and $v.partitions (mod (int $v.replicas) (int $v.copies)) }}{{ fail (printf "replicas: expected a multiple of copies (%d), got %d" (int $v.copies) (int $v.replicas)) }}{{ end -}}
{{- if and (not $v.partitions) (ne (int $v.copies) 1) }}{{ fail "copies: every node is a copy where there are no partitions; set replicas" }}{{ end -}}
{{- if and $v.tls.clientCA (not $v.tls.secret) }}{{ fail "tls.clientCA needs tls.secret" }}{{ end -}}
{{- if and $v.tls.clientCA $v.fronts.replicas }}{{ fail "fronts ask the nodes with a token, and show no certificate: tls.clientCA goes without fronts" }}{{ end -}}
{{- if and $v.monitor.enabled $v.tokens.secret (not $v.monitor.tokenSecret) }}{{ fail "monitor.tokenSecret: expected the name of a Secret with a token of the role metrics, as there are tokens" }}{{ end -}}
{{- if not (has $v.antiAffinity (list "required" "preferred")) }}{{ fail (printf "antiAffinity: expected required or preferred, got %v" $v.antiAffinity) }}{{ end -}}
{{- end }}

{{- /* MiB for rows in memory, of a node's values. */}}
{{- define "tierstore.hostBudget" -}}
{{- $memory := int .memoryMiB -}}
{{- $budget := int .hostBudgetMiB | default (div (mul $memory 3) 5 | int) -}}
{{- if gt (mul $budget 5) (mul $memory 4) }}{{ fail (printf "hostBudgetMiB: expected at most 80%% of memoryMiB (%d), got %d" $memory $budget) }}{{ end -}}
{{- $budget -}}
{{- end }}

{{- /* Every name under which a client may ask. */}}
{{- define "tierstore.hosts" -}}
{{- $name := include "tierstore.name" . -}}
{{- $names := list -}}
{{- $heads := list $name (printf "%s-client" $name) (printf "%s-front" $name) -}}
{{- range $i := until (int .Values.replicas) }}{{ $heads = append $heads (printf "%s-%d.%s" $name $i $name) }}{{ end -}}
{{- range $head := $heads -}}
{{- range $tail := list "" (printf ".%s" $.Release.Namespace) (printf ".%s.svc" $.Release.Namespace) (printf ".%s.svc.%s" $.Release.Namespace $.Values.clusterDomain) -}}
{{- $names = append $names (printf "%s%s" $head $tail) -}}
{{- end -}}
{{- end -}}
{{- join "," (concat $names .Values.allowedHosts) -}}
{{- end }}

{{- define "tierstore.upstream" -}}
{{- $name := include "tierstore.name" . -}}
{{- $urls := list -}}
{{- range $i := until (int .Values.replicas) }}{{ $urls = append $urls (printf "%s://%s-%d.%s.%s.svc:8000" (include "tierstore.scheme" $) $name $i $name $.Release.Namespace) }}{{ end -}}
{{- join "," $urls -}}
{{- end }}

{{- /* The pod of a component: root, component, of (its values). */}}
{{- define "tierstore.pod" -}}
{{- $v := .root.Values -}}
{{- $front := eq .component "front" -}}
terminationGracePeriodSeconds: {{ add (int $v.drainSeconds) 65 }}
automountServiceAccountToken: {{ ne $v.serviceAccount "" }}
{{- with $v.serviceAccount }}
serviceAccountName: {{ . }}
{{- end }}
{{- with $v.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {runAsNonRoot: true, runAsUser: 10001, fsGroup: 10001, fsGroupChangePolicy: OnRootMismatch, seccompProfile: {type: RuntimeDefault}}
affinity:
  podAntiAffinity:
    {{- if eq $v.antiAffinity "required" }}
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels: {{- include "tierstore.labels" . | nindent 12 }}
    {{- end }}
    preferredDuringSchedulingIgnoredDuringExecution:
      {{- range $weight, $key := dict "100" "topology.kubernetes.io/zone" "50" "kubernetes.io/hostname" }}
      - weight: {{ $weight }}
        podAffinityTerm:
          topologyKey: {{ $key }}
          labelSelector:
            matchLabels: {{- include "tierstore.labels" $ | nindent 14 }}
      {{- end }}
containers:
  - name: tierstore
    image: {{ printf "%s:%s" $v.image.repository ($v.image.tag | default .root.Chart.AppVersion) | quote }}
    imagePullPolicy: {{ $v.image.pullPolicy }}
    {{- if and $v.partitions (not $front) }}
    {{- $shares := div (int $v.replicas) (int $v.copies) }}
    # the share of this node: by the number at the end of its name
    command: [/bin/sh, -c]
    args:
      - >-
        share=$((${HOSTNAME##*-} % {{ $shares }}));
        exec tierstore serve --partition
        "$((share * {{ int $v.partitions }} / {{ $shares }}))-$(((share + 1) * {{ int $v.partitions }} / {{ $shares }} - 1))/{{ int $v.partitions }}"
    {{- else }}
    args: [serve]
    {{- end }}
    env:
      - {name: TIERSTORE_HOST_BUDGET, value: "{{ include "tierstore.hostBudget" .of }}MiB"}
      - {name: TIERSTORE_DRAIN_S, value: {{ $v.drainSeconds | quote }}}
      - {name: TIERSTORE_READY_WARM_SHARE, value: {{ $v.readyWarmShare | quote }}}
      - {name: TIERSTORE_GRPC_PORT, value: "8001"}
      - {name: TIERSTORE_LOG_FORMAT, value: json}
      - {name: TIERSTORE_ALLOW_OPEN_NETWORK, value: {{ not $v.tokens.secret | quote }}}
      - {name: TIERSTORE_ALLOWED_HOST, value: {{ include "tierstore.hosts" .root | quote }}}
      {{- if $v.tokens.secret }}
      - {name: TIERSTORE_TOKENS, value: /etc/tierstore/tokens/tokens.json}
      {{- end }}
      {{- if $v.tls.secret }}
      - {name: TIERSTORE_TLS_CERT, value: /etc/tierstore/tls/tls.crt}
      - {name: TIERSTORE_TLS_KEY, value: /etc/tierstore/tls/tls.key}
      {{- end }}
      {{- if $v.tls.clientCA }}
      - {name: TIERSTORE_TLS_CLIENT_CA, value: /etc/tierstore/tls/ca.crt}
      - {name: TIERSTORE_ADMIN_LISTEN, value: "unix:/run/tierstore/admin.sock"}   # probes have no certificate
      {{- end }}
      {{- if $front }}
      - {name: TIERSTORE_UPSTREAM, value: {{ include "tierstore.upstream" .root | quote }}}
      {{- if $v.tls.secret }}
      - {name: TIERSTORE_UPSTREAM_CA, value: /etc/tierstore/tls/ca.crt}
      {{- end }}
      {{- if $v.tokens.secret }}
      - name: TIERSTORE_UPSTREAM_TOKEN
        valueFrom: {secretKeyRef: {name: {{ $v.tokens.secret }}, key: front-token}}
      {{- if not $v.tls.secret }}
      - {name: TIERSTORE_UPSTREAM_ALLOW_INSECURE_TOKEN, value: "true"}   # within the cluster's network, or a mesh that encrypts
      {{- end }}
      {{- end }}
      {{- else if or $v.snapshots.claim $v.snapshots.urls }}
      - {name: TIERSTORE_SOURCE_ROOT, value: {{ join ":" (concat (ternary (list "/snapshots") (list) (ne $v.snapshots.claim "")) $v.snapshots.urls) | quote }}}
      {{- end }}
      {{- range $name, $value := $v.settings }}
      - {name: TIERSTORE_{{ upper $name }}, value: {{ $value | toString | quote }}}
      {{- end }}
    ports: [{name: http, containerPort: 8000}, {name: grpc, containerPort: 8001}]
    resources:
      requests: {cpu: {{ .of.cpu | quote }}, memory: {{ int .of.memoryMiB }}Mi}
      limits: {memory: {{ int .of.memoryMiB }}Mi}
    securityContext: {readOnlyRootFilesystem: true, allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
    {{- $live := printf "httpGet: {path: /v2/health/live, port: http, scheme: %s}" (include "tierstore.scheme" .root | upper) }}
    {{- $ready := printf "httpGet: {path: /v2/health/ready, port: http, scheme: %s}" (include "tierstore.scheme" .root | upper) }}
    {{- if $v.tls.clientCA }}
    {{- $asks := "exec: {command: [python, -c, \"import http.client, socket; c = http.client.HTTPConnection('localhost'); c.sock = socket.socket(socket.AF_UNIX); c.sock.connect('/run/tierstore/admin.sock'); c.request('GET', '/v2/health/%s'); assert c.getresponse().status == 200\"]}" }}
    {{- $live = printf $asks "live" }}
    {{- $ready = printf $asks "ready" }}
    {{- end }}
    startupProbe:   # kernels, and versions that were served before
      {{ $live }}
      periodSeconds: 2
      timeoutSeconds: 5
      failureThreshold: 150
    readinessProbe:
      {{ $ready }}
      periodSeconds: 2
      timeoutSeconds: 2
      failureThreshold: 2
    livenessProbe:
      {{ $live }}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 6
    volumeMounts:
      - {name: data, mountPath: /data}
      - {name: tmp, mountPath: /tmp}
      {{- if $v.tokens.secret }}
      - {name: tokens, mountPath: /etc/tierstore/tokens, readOnly: true}
      {{- end }}
      {{- if $v.tls.secret }}
      - {name: tls, mountPath: /etc/tierstore/tls, readOnly: true}
      {{- end }}
      {{- if $v.tls.clientCA }}
      - {name: run, mountPath: /run/tierstore}
      {{- end }}
      {{- if and $v.snapshots.claim (not $front) }}
      - {name: snapshots, mountPath: /snapshots, readOnly: true}
      {{- end }}
volumes:
  - {name: tmp, emptyDir: {medium: Memory, sizeLimit: 64Mi}}
  {{- if $front }}
  - {name: data, emptyDir: {}}   # copies of records and hot keys alone
  {{- end }}
  {{- with $v.tokens.secret }}
  - {name: tokens, secret: {secretName: {{ . }}, defaultMode: 0440, items: [{key: tokens.json, path: tokens.json}]}}
  {{- end }}
  {{- with $v.tls.secret }}
  - {name: tls, secret: {secretName: {{ . }}, defaultMode: 0440}}
  {{- end }}
  {{- if $v.tls.clientCA }}
  - {name: run, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
  {{- end }}
  {{- if and $v.snapshots.claim (not $front) }}
  - {name: snapshots, persistentVolumeClaim: {claimName: {{ $v.snapshots.claim }}, readOnly: true}}
  {{- end }}
{{- end }}
